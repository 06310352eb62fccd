"""The slot protocol's rules: which expert lies in which slot, when a slot may be reused."""
