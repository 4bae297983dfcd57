"""Sharding of a model over the ranks. Independent of number formats and of the loop.

mesh               the mesh and its groups of ranks
comm               messages between ranks outside training; whether they have the same, and call the same
axis, data_strategy      the two contracts: an axis that shards the model; how data ranks replicate or shard it
rng                random numbers that ranks share, and those that differ
shard_spec         the boxes of the full tensor that a rank holds
expert             experts of mixture-of-experts layers, one group on each rank
reducer            reductions of gradients: over data ranks and other axes
collectives        sums and exchanges that autograd can run backward
registries         axes, data strategies, tensor styles and plans, partitioners, schedules
trial              what a model or an optimizer is tried out with before training

tensor/            layers sharded over a tensor group
context/           sequences sharded over ranks
pipeline/          stages, and microbatches that go through them
sharding/          weights, gradients and optimizer state sharded over the data ranks: zero1 and fsdp
models/            plans for the models of timm, torch.nn, torchvision and transformers
"""
