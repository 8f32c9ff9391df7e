"""Tools that examine runs, scripts and clusters."""
