"""Which rank holds what. Independent of number formats and of the loop.

context            the mesh and its groups of ranks
objects, calls, initial_state      what ranks tell each other beside training
axis, data_strategy      the two contracts: what divides a model, and what data ranks hold of it
rng                random numbers of a rank, and those that ranks share
shard_spec         where in the whole tensor lies what a rank holds
gradient_sums      gradients become complete: over data ranks (reducer, buckets) and other axes
registries         axes, data strategies, tensor styles and plans, partitioners, schedules
replica_checks     what ranks have in common, compared
optimizer_checks   whether an optimizer may step parts

tensor/            layers divided over a tensor group
pipeline/          stages, and microbatches that go through them
sharding/          weights, gradients and optimizer state in parts over the data ranks: zero1 and fsdp
activations/       computed again in backward, or kept on the host
deferred/          models that get their values rank by rank
models/            what is known of timm, torch.nn, torchvision and transformers
"""
