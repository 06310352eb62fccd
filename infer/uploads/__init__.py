"""Slots in GPU memory that one client keeps for itself, where a daemon cannot keep them for all."""
