"""PLACE: which rank holds what. Knows nothing of number formats or of the loop."""
