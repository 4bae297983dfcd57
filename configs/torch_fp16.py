"""Mode TORCH in fp16: torch.autocast decides per operation, the parameters stay in fp32.

    python examples/train_vit.py --config configs/torch_fp16.py

The mode to begin with: it changes a model least. Matrix products run in fp16; operations that need range or accuracy
(softmax, norms, losses) run in fp32. It costs memory: parameters, gradients and optimizer state are all in fp32.
"""

from halfmesh import AMP_TYPE

fp16 = dict(
    mode=AMP_TYPE.TORCH,  # or the string "torch"
    # Small gradients would round to zero in fp16. So the loss is multiplied by a scale before backward, and the
    # gradients are divided by it before the update. Where a gradient overflows, the update is skipped and the scale
    # is lowered; after a while without overflow it is raised again.
    init_scale=2.0**16,  # start here: the first few updates may be skipped while it finds its level
    backoff_factor=0.5,  # times this after an overflow
    growth_factor=2.0,  # times this after `growth_interval` updates without one
    growth_interval=100,  # the default of 2000 suits long runs; this one has about 400 updates in all
)

# Names in capitals are your own: halfmesh hands them through as config.NUM_EPOCHS and never looks at them.
NUM_EPOCHS = 20
BATCH_SIZE = 32  # images per data rank: with 2 ranks an update sees 64
LEARNING_RATE = 2e-3
WARMUP_EPOCHS = 2  # the learning rate rises from near 0 to LEARNING_RATE, then falls to 0
WEIGHT_DECAY = 0.05
ADAM_EPS = 1e-8  # torch's default
