"""What `infer selftest` does: this machine's arithmetic against float64 on the CPU, no model."""
