"""What fits into which memory, and how fast it will be."""
