"""Decoding without Python between kernels: recorded once, replayed for each token."""
