"""What looks at runs and clusters."""
