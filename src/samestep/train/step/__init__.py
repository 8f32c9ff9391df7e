"""One optimizer step: its passes over the micro-batches, and what listens to or intercepts them."""
