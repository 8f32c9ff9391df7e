"""How a run ends: by its last step, by a stop, by a signal or with the process."""
