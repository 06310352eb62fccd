"""The multi-token-prediction (MTP) block: one layer more behind the trunk, for drafting.

Most files hold it themselves, as the first of their `nextn_predict_layers` blocks; some have it in
a second file beside them. It costs memory and is served only where somebody asks for it:

    --mtp           the block of the model's own file
    --mtp FILE      that of another GGUF, as if it were one more shard of the model
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from shared.daemon_options import OWN_MTP
from shared.errors import UnsupportedModel
from shared.experts import trunk_layer_count
from shared.gguf_index import GgufIndex, TensorInfo

# The tensor that makes a block an MTP block: it joins the embedding and the hidden state.
_JOINT = re.compile(r"blk\.([0-9]{1,9})\.nextn\.eh_proj\.weight")


def open_served(model: Path, mtp: str, *, partial: bool = False) -> GgufIndex:
    """What a daemon serves: the model, and the MTP block that `mtp` names ("" for none).

    `mtp` is OWN_MTP or a file; `partial` as in GgufIndex.open. Raises what GgufIndex.open does, and
    UnsupportedModel where there is no MTP block or several in that file.
    """
    index = GgufIndex.open(model, partial=partial)
    if not mtp:
        return index
    if mtp == OWN_MTP:
        return _with_own(index)
    return _with_file(index, GgufIndex.open(mtp))


def _with_own(index: GgufIndex) -> GgufIndex:
    number = trunk_layer_count(index)
    if f"blk.{number}.nextn.eh_proj.weight" not in index.tensors:
        raise UnsupportedModel(
            f"{index.paths[0]} has no MTP block (blk.{number}.nextn.eh_proj.weight)",
            "name a file that has one with --mtp FILE.gguf, or leave --mtp and --draft out",
        )
    return dataclasses.replace(index, mtp=True)


def _with_file(index: GgufIndex, other: GgufIndex) -> GgufIndex:
    """The model with the other file's MTP block in the place of its own."""
    theirs, ours = f"blk.{_only_block(other)}.", f"blk.{trunk_layer_count(index)}."
    added = {
        (name := ours + tensor.name.removeprefix(theirs)): tensor._replace(
            name=name, file_index=tensor.file_index + len(index.paths)
        )
        for tensor in other.tensors.values()
        if tensor.name.startswith(theirs)
    }
    kept = {name: info for name, info in index.tensors.items() if not name.startswith(ours)}
    tensors: Mapping[str, TensorInfo] = MappingProxyType(kept | added)
    return dataclasses.replace(
        index,
        paths=index.paths + other.paths,
        fingerprints=index.fingerprints + other.fingerprints,
        tensors=tensors,
        mtp=True,
    )


def _only_block(index: GgufIndex) -> int:
    """The number of the file's one MTP block."""
    numbers = {int(joint[1]) for name in index.tensors if (joint := _JOINT.fullmatch(name))}
    if len(numbers) != 1:
        found = ", ".join(map(str, sorted(numbers))) or "none"
        raise UnsupportedModel(
            f"{index.paths[0]} must have one MTP block; those it has: {found}",
            "give --mtp a file with one blk.N.nextn.eh_proj.weight, made from the same model",
        )
    return numbers.pop()
