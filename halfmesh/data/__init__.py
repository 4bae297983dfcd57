"""Shards the training data, moves it to this rank's device, and resumes it. In reading order:

loader.py    `EngineDataLoader`: fetches and copies batches, and detects the end of an epoch.
resume.py    `epoch_batches`: the random numbers of an epoch, and its resume.
sharding.py  `ShardedLoader`: the data rank's shard of the user's loader, in the order of one process.

It imports parallel and the packages below it.
"""
