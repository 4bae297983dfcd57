"""Checkpoints: what is saved, how it lies in a folder, and how it comes back into any layout."""
