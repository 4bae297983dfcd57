"""The training data, on this rank's device. In reading order:

loader.py    `EngineDataLoader`: when a batch is fetched and copied, where an epoch ends.
sharding.py  `ShardedLoader`: the data rank's part of the user's loader, in the order of one process.
resume.py    `EpochState`: how far an epoch has come, and how it is resumed.

May import parallel and what is below it; not engine, checkpoint, debug or launch.
"""
