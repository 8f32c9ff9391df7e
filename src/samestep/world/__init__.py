"""Who am I, and whom can I talk to."""
