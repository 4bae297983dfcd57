"""Models that are built without memory, and whose values are made late: of each only what a rank holds."""
