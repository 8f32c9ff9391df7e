"""Loading: from a data set to batches on the device."""
