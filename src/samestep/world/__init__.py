"""The environment of this rank, the group of all ranks, and their communication apart from gradients."""
