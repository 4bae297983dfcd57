"""Starting ranks, and naming the one that failed."""
