"""What a run consists of: the objects of the script, where the run is, and how both are restored."""
