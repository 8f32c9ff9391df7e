"""Where the recipes find their data."""
