"""Weights that belong to no expert: in memory once, or streamed a layer ahead."""
