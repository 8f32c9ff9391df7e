"""`samestep doctor`: checks and measures a machine or a cluster before training."""
