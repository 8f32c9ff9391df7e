"""Starting the ranks."""
