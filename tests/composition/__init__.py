"""The composition suite: every mode in every layout trains to parity, or is rejected with its message."""
