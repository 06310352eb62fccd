"""What outlives a run: the hot list, traces."""
