"""Whole runs in one process, simulated from one seed (docs/dev/simulation.md)."""
