"""The API of a training script: runs, epochs, steps, evaluation."""
