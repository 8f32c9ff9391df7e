"""Checks of scripts and ranks, which end a run that would train something else or wait for ever."""
