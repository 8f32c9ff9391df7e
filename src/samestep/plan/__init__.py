"""Pure functions that plan a run: which samples, micro-batches and ranks, and the order of additions."""
