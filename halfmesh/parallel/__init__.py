"""Shards a model over the ranks. This package does not depend on number formats or the training loop.

dims, mesh         the sizes of the axes; the mesh and its groups of ranks
comm               messages between ranks outside training, and checks that ranks have equal values and make equal calls
axis, data_strategy      the base classes of an axis that shards the model, and of a strategy for the data ranks
rng                random numbers that are equal on all ranks, and those that differ
shard_spec         the boxes of the full tensor that a rank holds
whole_steps        optimizers that step whole parameters, of which ranks hold shards
expert             experts of mixture-of-experts layers, one group on each rank
reducer            reductions of gradients: over data ranks and other axes; buckets: what they send at a time
collectives        sums and exchanges that autograd can run backward
registries         axes, data strategies, tensor styles and plans, partitioners, schedules
trial              copies of modules without memory, and test calls of a model or an optimizer before training

tensor/            layers sharded over a tensor group
context/           sequences sharded over ranks
pipeline/          stages, and the microbatches that pass through them
sharding/          weights, gradients and optimizer state sharded over the data ranks: zero1 and fsdp
models/            plans for the models of timm, torch.nn, torchvision and transformers
"""
