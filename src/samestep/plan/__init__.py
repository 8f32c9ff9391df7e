"""The theory of a run, pure: which samples, which micro-batches, which ranks, which order of additions."""
