"""Pipeline parallelism: the stages of a model on different ranks, with the bits of one rank that holds them all."""
