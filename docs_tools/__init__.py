"""The list of public names that a test freezes, and the links of the documentation site."""
