"""The data of the recipes."""
