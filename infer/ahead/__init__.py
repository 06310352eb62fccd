"""What the next layers will need: prediction, hints, and whether they pay."""
