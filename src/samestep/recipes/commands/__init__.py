"""The commands of `samestep` that belong to recipes."""
