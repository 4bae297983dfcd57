"""Fully sharded data parallelism (FSDP2), in bf16: weights, gradients and optimizer state are sharded.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --config configs/fsdp.py
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --config configs/fsdp.py --set parallel.data=zero1

For models of which one device cannot hold weights and optimizer state. The loop, and the weights after training, are
those of plain data parallelism. Mode NAIVE gathers weights in half precision, and the shards are the fp32 masters. See
docs/sharding.md.
"""

from halfmesh import AMP_TYPE

bf16 = dict(mode=AMP_TYPE.NAIVE)

# zero1 is the smaller step: only the optimizer state is sharded; weights and gradients stay whole on each rank.
parallel = dict(
    data=dict(
        strategy="fsdp",
        reduce_dtype="float32",  # the default: gradients are summed in fp32, whatever the weights' format
        reshard_after_forward=True,  # as by default: a block gives its weights up between its forward and its backward
        prefetch=1,  # the default: the next block's weights are gathered while one computes
    ),
)

# Names in capitals are your own: halfmesh hands them through as config.NUM_EPOCHS and never looks at them.
NUM_EPOCHS = 20
BATCH_SIZE = 32  # images per data rank: with 2 ranks an update sees 64
LEARNING_RATE = 2e-3
WARMUP_EPOCHS = 2  # the learning rate rises from near 0 to LEARNING_RATE, then falls to 0
WEIGHT_DECAY = 0.05
ADAM_EPS = 1e-8  # torch's default
