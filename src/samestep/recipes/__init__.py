"""Plain scripts on the surface, to run and to copy."""
