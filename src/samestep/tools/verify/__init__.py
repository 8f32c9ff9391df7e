"""`samestep verify`: a script trained at several numbers of ranks, and interrupted, must give one and the same run."""
