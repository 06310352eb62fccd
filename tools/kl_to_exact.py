"""How far the default arithmetic (8-bit activations) is from exact: mean KL divergence, top-1.

python tools/kl_to_exact.py models/demo-hy3-iq2mix.gguf --text FILE.txt
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

from infer.config import ModelConfig
from infer.session import Session
from shared.command import run_command


def log_probabilities(model: Path, text: str, exact: bool) -> torch.Tensor:
    """float64 [n, vocab] for BOS + text, cut to the context."""
    with Session(ModelConfig(model=model, exact=exact)) as session:
        ids = session.tokenizer.encode(text)
        if session.tokenizer.bos_id is not None:
            ids.insert(0, session.tokenizer.bos_id)
        rows = session.engine.logits(ids[: session.engine.kv.context])
    return torch.log_softmax(torch.from_numpy(rows).double(), -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8")
    arguments = parser.parse_args()
    text = arguments.text.read_text()
    exact = log_probabilities(arguments.model, text, exact=True)
    default = log_probabilities(arguments.model, text, exact=False)
    divergence = (exact.exp() * (exact - default)).sum(-1)
    same = (exact.argmax(-1) == default.argmax(-1)).double().mean()
    print(
        f"{len(exact)} tokens: mean KL {divergence.mean():.5f} nats,"
        f" 99th percentile {np.quantile(divergence.numpy(), 0.99):.5f}, top-1 equal {same:.1%}"
    )


if __name__ == "__main__":
    sys.exit(run_command("kl_to_exact", main))
