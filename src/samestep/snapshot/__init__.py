"""Snapshots and the run directory."""
