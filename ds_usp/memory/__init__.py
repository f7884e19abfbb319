"""Floor 1: what is kept for the backward pass, computed again, or waits on the host."""
