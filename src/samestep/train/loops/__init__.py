"""The loop over epochs and steps, its metrics, and evaluations."""
