"""`samestep scale` and `samestep plan`: how a script scales with the number of ranks, measured and predicted."""
