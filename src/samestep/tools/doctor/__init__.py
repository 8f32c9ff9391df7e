"""`samestep doctor`: whether a machine, or a cluster, is fit to train on, before anything trains."""
