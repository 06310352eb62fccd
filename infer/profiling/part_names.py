"""What the parts of a model are called where their time is shown."""

ATTENTION, ROUTER, EXPERTS, SHARED = "attention", "router", "experts", "shared expert"
DENSE, NORMS, EMBEDDING, HEAD = "dense feed-forward", "norms", "embedding", "output head"
SECTIONS, WAITS, AHEAD = "sections of slots", "daemon waits", "reading ahead"
LANE = "experts on the CPU"
SAMPLING, BETWEEN = "sampling", "Python between"
LAUNCHES, GPU = "launching graphs", "waiting for the GPU"
