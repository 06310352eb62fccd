"""Headers of models that are not there."""

import json

import pytest
from checkpoint_factory import (
    GLM_CONFIG,
    HY3_CONFIG,
    glm_checkpoint,
    hy3_checkpoint,
    write_tokenizer,
)
from gguf_convert import main as convert
from gguf_template import main

from infer.cli import main as infer
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from streamd.cli import main as streamd

GLM_5_2 = GLM_CONFIG | {
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 1048576,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "indexer_types": None,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "first_k_dense_replace": 3,
}


def _folder(path, config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)
    return path


@pytest.mark.parametrize("make", [hy3_checkpoint, glm_checkpoint])
def test_it_is_the_converted_files_header(tmp_path, make):
    make(tmp_path / "model")
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).write_bytes((tmp_path / "model" / name).read_bytes())
    options = ["--type", "*_exps=Q2_K", "--name", "same"]
    whole, header = tmp_path / "whole.gguf", tmp_path / "header.gguf"
    assert convert([str(tmp_path / "model"), "-o", str(whole), *options]) == 0
    assert main([str(tmp_path / "bare"), "-o", str(header), *options]) == 0
    head = header.read_bytes()
    assert whole.read_bytes()[: len(head)] == head


def test_the_real_glm_has_its_real_sizes(tmp_path):
    out = tmp_path / "glm.gguf"
    folder = _folder(tmp_path / "glm", GLM_5_2)
    assert main([str(folder), "-o", str(out), "--type", "*_exps=IQ2_XXS"]) == 0
    index = GgufIndex.open(out, partial=True)
    experts = ExpertIndex.from_gguf(index)
    assert [c.slab_bytes for c in experts.classes] == [3 * 3_244_032]
    assert (experts.n_layers, experts.n_experts, len(experts.classes[0].layers)) == (78, 256, 75)
    own = index.metadata["glm-dsa.attention.indexer.types"].nonzero()[0].tolist()
    assert own == [0, 1, 2, *range(6, 78, 4)]
    assert "blk.78.nextn.eh_proj.weight" in index.tensors


def test_inspect_and_plan_take_it(tmp_path, capsys):
    out = tmp_path / "hy3.gguf"
    assert main([str(_folder(tmp_path / "hy3", HY3_CONFIG)), "-o", str(out)]) == 0
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["infer", "inspect", str(out), "--json"])
        assert infer() == 0
        assert json.loads(capsys.readouterr().out)["architecture"] == "hy_v3"
        patch.setattr("sys.argv", ["streamd", "plan", "--model", str(out), "--json"])
        assert streamd() == 0
    assert json.loads(capsys.readouterr().out)["experts"] == 4


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    folder = _folder(tmp_path / "hy3", HY3_CONFIG)
    assert main([str(folder), "-o", str(tmp_path / "x.gguf"), "--dry-run"]) == 0
    assert "blk.2.nextn.hnorm.weight" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["hy3"]
