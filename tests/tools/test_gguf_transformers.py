"""Random models of transformers, converted: infer's logits are theirs. Skipped without it."""

import importlib.util
import json
import warnings

import numpy as np
import pytest
import torch
from checkpoint_factory import write_safetensors, write_tokenizer
from gguf_convert import main as convert
from gguf_mix import main as mix

from infer.config import ModelConfig
from infer.session import Session

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

TOLERANCE = 1e-4
IDS = torch.randint(0, 384, (40,), generator=torch.Generator().manual_seed(1)).tolist()
COMMON = {
    "vocab_size": 384,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.08,
    "attn_implementation": "eager",
}


def _hy3():
    config = transformers.HYV3Config(
        num_hidden_layers=3, num_key_value_heads=2, head_dim=64, num_experts=8, **COMMON
    )
    return transformers.HYV3ForCausalLM(config)


def _glm():
    config = transformers.GlmMoeDsaConfig(
        num_hidden_layers=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        kv_lora_rank=128,
        q_lora_rank=128,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
        index_topk=8,
        index_head_dim=64,
        index_n_heads=16,  # with few, all scores of a row may be 0, and any choice is right
        first_k_dense_replace=1,
        indexer_types=["full", "full", "shared", "full"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **COMMON,
    )
    model = transformers.GlmMoeDsaForCausalLM(config)
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = 1e-5  # as the file says; transformers has 1e-6 here
    return model


def _random_model(make):
    torch.manual_seed(0)
    model = make().eval().float()
    with torch.no_grad():
        for name, values in model.state_dict().items():
            if "norm" in name and name.endswith("weight"):
                values.normal_(1, 0.1)
            elif "correction_bias" in name:
                values.normal_(0, 0.1)
            else:
                values.normal_(0, 0.08)
    return model


def _stored(name, values, kind):
    """(what is left of float32 values, the tensors they are stored as)"""
    if kind == "F32" or values.ndim < 2 or (kind == "FP8" and "mlp.gate." in name):
        return values, {name: ("F32", tuple(values.shape), values.numpy().tobytes())}
    if kind == "BF16":
        cut = values.bfloat16()
        return cut.float(), {
            name: ("BF16", tuple(values.shape), cut.view(torch.uint8).numpy().tobytes())
        }
    rows, columns = values.shape[-2:]
    blocks = torch.nn.functional.pad(values, (0, -columns % 128, 0, -rows % 128))
    blocks = blocks.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
    scale = blocks.abs().amax((-3, -1)) / 448
    spread = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :rows, :columns]
    codes = (values / spread).to(torch.float8_e4m3fn)
    raw = codes.view(torch.uint8).numpy().tobytes()
    return codes.float() * spread, {
        name: ("F8_E4M3", tuple(values.shape), raw),
        f"{name}_scale_inv": ("F32", tuple(scale.shape), scale.contiguous().numpy().tobytes()),
    }


def _save(model, folder, kind):
    folder.mkdir()
    tensors = {}
    with torch.no_grad():
        for name, values in model.state_dict().items():
            left, stored = _stored(name, values.contiguous(), kind)
            values.copy_(left)
            tensors |= stored
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    write_tokenizer(folder)


def _infer_logits(path):
    config = ModelConfig(model=path, exact=True, host_cache="64M", ctx=64)
    with Session(config) as session:
        return session.engine.logits(IDS)


@pytest.mark.parametrize("make", [_hy3, _glm])
@pytest.mark.parametrize("kind", ["F32", "BF16", "FP8"])
def test_logits_are_those_of_transformers(tmp_path, make, kind):
    model = _random_model(make)
    _save(model, tmp_path / "model", kind)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    out = tmp_path / "out.gguf"
    types = "*=BF16" if kind == "BF16" else "*=F32"
    assert convert([str(tmp_path / "model"), "-o", str(out), "--type", types]) == 0
    found = _infer_logits(out)
    assert np.abs(found - expected).max() < TOLERANCE
    assert (found.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("make", [_hy3, _glm])
def test_a_mix_computes_as_its_dequantised_weights(tmp_path, make):
    _save(_random_model(make), tmp_path / "model", "F32")
    whole, mixed, plain = (tmp_path / f"{name}.gguf" for name in ("whole", "mixed", "plain"))
    assert convert([str(tmp_path / "model"), "-o", str(whole), "--type", "*=F32"]) == 0
    types = ["*=Q8_0", "*_exps=Q4_K", "blk.2.*up_exps=Q3_K"]
    options = [word for rule in types for word in ("--type", rule)]
    assert mix([str(whole), "-o", str(mixed), *options]) == 0
    assert mix([str(mixed), "-o", str(plain), "--type", "*=F32"]) == 0
    assert np.abs(_infer_logits(mixed) - _infer_logits(plain)).max() < TOLERANCE
