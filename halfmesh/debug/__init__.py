"""What the numbers of a run are like: where inf or nan came from, and what half precision does to each layer."""
