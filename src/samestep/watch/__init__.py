"""Metrics, progress, and the supervision of a run."""
