"""What a user's script touches."""
