"""Gradient accumulation and clipping, in mode NAIVE. The training loop stays the same.

python examples/train_vit.py --config configs/accumulation_clipping.py
"""

from halfmesh import AMP_TYPE

fp16 = dict(mode=AMP_TYPE.NAIVE, growth_interval=100)

# Four small batches make one update: a large batch in the memory of a small one. The loop still calls
# engine.step() for each of them; it returns None until the fourth. An epoch's last, shorter cycle is averaged right.
gradient_accumulation = 4

# Gradients whose norm, over all ranks and with the loss scale taken out, is larger are shortened to it.
# 0, the default, is off; dict(max_norm=1.0, norm_type="inf") clips by the largest element instead.
clip_grad_norm = 1.0

# Names in capitals are your own: halfmesh hands them through as config.NUM_EPOCHS and never looks at them.
NUM_EPOCHS = 20
BATCH_SIZE = 8  # images per data rank: an update sees 32 on each
LEARNING_RATE = 2e-3
WARMUP_EPOCHS = 2  # the learning rate rises from near 0 to LEARNING_RATE, then falls to 0
WEIGHT_DECAY = 0.05
ADAM_EPS = 1e-8  # torch's default
