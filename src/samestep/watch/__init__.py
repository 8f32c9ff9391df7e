"""What a run says about itself."""
