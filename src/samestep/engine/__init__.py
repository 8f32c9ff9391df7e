"""One gradient from many."""
