"""FORMAT: which number format each tensor has. Works alone, in one process, and knows nothing of ranks or loops."""
