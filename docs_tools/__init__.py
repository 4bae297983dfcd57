"""What writes and builds the documentation: generated pages, and the links of the site."""
