"""Other people's models, in each layout: trained to parity, or rejected."""
