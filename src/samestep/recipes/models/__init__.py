"""The models of the recipes. Each file imports torch only, so that exported weights load without samestep."""
