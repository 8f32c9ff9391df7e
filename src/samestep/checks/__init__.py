"""Checks of a run that its options turn on: interceptors, see `train/interception.py`."""
