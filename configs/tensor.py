"""Tensor parallelism, in bf16: the large layers are sharded over 2 ranks, which compute each of them together.

    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --config configs/tensor.py
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --config configs/tensor.py --set parallel.tensor=4

For models that are too large for one device. 2 ranks hold one copy of the model, sharded; 4 ranks hold two such
copies, and each copy sees its own shard of the data. --set bf16=null trains in fp32, --set bf16.mode=naive with
weights, gradients and activations in bf16.
"""

from halfmesh import AMP_TYPE

bf16 = dict(mode=AMP_TYPE.TORCH)

# Which rank holds what. Data parallelism takes the ranks that are left: all of them / size.
parallel = dict(
    tensor=dict(
        size=2,  # ranks that share one copy; it has to divide attention heads, features, and words of an embedding
        sequence_parallel=False,  # True: activations between sharded layers are sharded, too, along the sequence
    ),
)

# Names in capitals are your own: halfmesh hands them through as config.NUM_EPOCHS and never looks at them.
NUM_EPOCHS = 20
BATCH_SIZE = 32  # images per data rank: with 2 ranks an update sees 64
LEARNING_RATE = 2e-3
WARMUP_EPOCHS = 2  # the learning rate rises from near 0 to LEARNING_RATE, then falls to 0
WEIGHT_DECAY = 0.05
ADAM_EPS = 1e-8  # torch's default
