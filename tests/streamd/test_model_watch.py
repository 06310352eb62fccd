"""Looking after the model's file: what is noticed, who is let in, what may be opened anew."""

import os
import shutil

import pytest

from shared.errors import ModelChanged, ModelError
from shared.gguf_index import GgufIndex
from streamd.model_watch import INTERVAL_S, ModelWatch, check_opens


@pytest.fixture
def model(demo_model, tmp_path):
    path = tmp_path / "m.gguf"
    shutil.copy(demo_model, path)
    return path


def test_a_replaced_file_is_noticed_once_in_a_while_and_keeps_clients_out(model, tmp_path):
    index = GgufIndex.open(model)
    now_s = [0.0]
    watch = ModelWatch(index, lambda: now_s[0])
    shards = [list(shard) for shard in index.fingerprints]
    watch.check_client(shards)
    with pytest.raises(ModelChanged, match="not the file that the daemon has opened"):
        watch.check_client([[1, 2, 3, 4]])
    shutil.copy(model, tmp_path / "new")
    os.replace(tmp_path / "new", model)
    assert watch.look() is None, "not so soon"
    now_s[0] += INTERVAL_S
    fault = watch.look()
    assert str(fault) == (
        f"{model} is not the file that was opened: it has been replaced"
        " (streamd reload takes the file as it is now)"
    )
    watch.fault = fault
    now_s[0] += INTERVAL_S
    assert watch.look() is None, "it is known"
    with pytest.raises(ModelChanged, match="it has been replaced"):
        watch.check_client(shards)


@pytest.mark.parametrize(
    "ruin",
    [
        lambda path: path.write_text("notes"),
        lambda path: os.truncate(path, path.stat().st_size // 2),
        os.unlink,
    ],
)
def test_what_would_not_open_is_told(ruin, model):
    check_opens(model, "")
    ruin(model)
    with pytest.raises(ModelError, match=r"m\.gguf"):
        check_opens(model, "")
