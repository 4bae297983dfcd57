"""The training data: loaders sharded over the data ranks, and how an epoch is resumed."""
