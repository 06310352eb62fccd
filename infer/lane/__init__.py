"""The compute lane: the CPU computes experts in host slots, which need not be uploaded then."""
