"""The gradient of a step: folding, exchange and averages of the micro-batches' gradients."""
