"""A random Hy3 model whose MTP block often guesses what the model itself says.

Its layers change the residual stream by little, so that both say about what the last token's
embedding alone leads to: the block's joint matrix hands the embedding on and leaves the hidden
state out.

    trunk: head(norm(e + little))        block: head(norm(norm(e) + little))
"""

from typing import Any

import numpy as np
from gguf_factory import TinyModel, float_tensor, hy3_model, random_tensor

# What a layer adds to the residual stream comes out of these.
_LAST_MATRICES = ("attn_output", "ffn_down", "ffn_down_shexp", "ffn_down_exps")


def agreeing_model(strength: float, **knobs: Any) -> TinyModel:
    """strength: of the layers; 0 makes all guesses right, 0.01 six of ten. `knobs`: Hy3Shape."""
    model = hy3_model(mtp=True, **knobs)
    rng = np.random.default_rng(1)
    for name, tensor in model.tensors.items():
        if name.startswith("blk.") and name.split(".")[2] in _LAST_MATRICES:
            std = strength * tensor.shape[0] ** -0.5
            model.tensors[name] = random_tensor(rng, tensor.shape, tensor.type_id, std)
    [joint] = [name for name in model.tensors if name.endswith("nextn.eh_proj.weight")]
    prefix = joint.removesuffix("eh_proj.weight")
    width = model.tensors[joint].shape[1]
    model.tensors[joint] = float_tensor(np.eye(width, 2 * width))
    model.tensors[f"{prefix}enorm.weight"] = float_tensor(np.ones(width))
    model.tensors[f"{prefix}shared_head_norm.weight"] = model.tensors["output_norm.weight"]
    return model
