"""What trains as one process does: a row for each fact beside the product of modes and layouts in tests/composition,
proven as `halfmesh verify` proves a layout."""
