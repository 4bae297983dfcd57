"""What a config would do, before it does it."""
