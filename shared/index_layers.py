"""Which layers of a sparse-attention model own an index; others read what the last one chose."""

import re

from shared.errors import MalformedModel
from shared.gguf_index import GgufIndex

# Files that do not list the layers: from this context on the pattern is GLM-5.2's.
_SPARSE_CONTEXT = 1 << 20
_INDEXER_NAME = re.compile(r"blk\.([0-9]{1,9})\.indexer\.")


def index_layers(index: GgufIndex, n_layers: int) -> tuple[int, ...]:
    """By the file's list, a truth value a layer, else by what is known of the model; none where the
    model has no indexer. MalformedModel for a list that cannot be."""
    if f"{index.architecture}.attention.indexer.top_k" not in index.metadata:
        return ()
    key = f"{index.architecture}.attention.indexer.types"
    given = index.metadata.get(key)
    if given is None:
        sparse = index.arch_key("context_length", int) >= _SPARSE_CONTEXT
        # 0, 1, 2, 6, 10, 14 ...
        return tuple(n for n in range(n_layers) if not sparse or n < 2 or n % 4 == 2)
    owns = list(given) if hasattr(given, "tolist") or isinstance(given, list) else []
    if len(owns) < n_layers or any(own not in (0, 1) for own in owns) or not owns[0]:
        raise MalformedModel(
            f"{index.paths[0]}: {key} is no list of a truth value for each of {n_layers} layers,"
            " of which the first is true",
            "convert or download the model again",
        )
    return tuple(n for n in range(n_layers) if owns[n])


def is_unused_indexer(name: str, owners: tuple[int, ...]) -> bool:
    """Whether a tensor is of an indexer that is not among `owners`: some files have one in every
    layer, though most are not read."""
    found = _INDEXER_NAME.match(name)
    return found is not None and int(found[1]) not in owners
