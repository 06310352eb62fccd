"""The daemon's other end: attaching, reading slots, recovering after its restart."""
