"""KV and latent caches, and keeping them in files."""
