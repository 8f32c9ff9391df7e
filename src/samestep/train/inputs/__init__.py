"""What a loop reads: its data set, the order of a sampler, and what a run recorded about its samples."""
