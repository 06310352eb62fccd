"""Memory that slots and resident tensors lie in, on the host and on the GPU."""
