"""From logits to tokens: sampling, drafting, verifying."""
