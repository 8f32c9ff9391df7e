"""`samestep scale`: how a script scales with the number of ranks."""
