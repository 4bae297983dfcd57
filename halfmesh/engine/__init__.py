"""TIME: when each thing happens in a step."""
