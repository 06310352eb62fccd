"""What stands around the layers by its tensor names, which the families share."""

from collections.abc import Sequence

from infer.ahead.prompt_ahead import MAX_DISTANCE, PromptAhead
from infer.ahead.touch_guess import TouchGuess
from infer.families.parts import Parts
from infer.model import Layer, Model, ModelShape


def bind_trunk(parts: Parts, shape: ModelShape, layers: Sequence[Layer]) -> Model:
    """Embedding, last norm and output; a file without an output has the embedding for it."""
    weights = parts.weights
    width, vocab_size = shape.width, shape.vocab_size
    output = weights.first("output.weight", "token_embd.weight")
    guess = TouchGuess(parts.kernels, shape.eps, layers, MAX_DISTANCE)
    return Model(
        parts.kernels,
        shape,
        weights.matrix("token_embd.weight", vocab_size, width),
        layers,
        weights.vector("output_norm.weight", width),
        weights.matrix(output, vocab_size, width),
        PromptAhead(parts.source, parts.experts.n_experts, guess),
    )
