"""`samestep replay`: a step of a run computed again, and compared with the bits that the run recorded."""
