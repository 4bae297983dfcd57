"""Weights, gradients and optimizer state in parts over the data ranks."""
