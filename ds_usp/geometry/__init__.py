"""Floor 0: who holds which token and which pairs a step computes. Integers only, no torch."""
