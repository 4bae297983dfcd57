"""Training scripts that people really run, converted as a new user would: what counts as reasonable user code."""
