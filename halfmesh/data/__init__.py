"""The training data, on this rank's device. In reading order:

loader.py    `EngineDataLoader`: when a batch is fetched and copied, where an epoch ends.
resume.py    `epoch_batches`: the random numbers of an epoch, and how it is resumed.
sharding.py  `ShardedLoader`: the data rank's part of the user's loader, in the order of one process.

Imports parallel and what is below it.
"""
