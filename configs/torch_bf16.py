"""Mode TORCH in bf16: torch.autocast with a format that has the range of fp32 and 8 bits of precision.

    python examples/train_vit.py --config configs/torch_bf16.py
    python examples/train_vit.py --config configs/torch_bf16.py --set bf16=null  # in fp32

Nothing overflows, so there is no loss scale and no skipped update; keys about the scale are rejected. Prefer it to
fp16 where the device has it (NVIDIA GPUs from Ampere on, and recent CPUs).

A config is an ordinary Python file. Lower-case names are halfmesh's settings, each with a default, and an unknown one
is rejected. The values here suit the small Vision Transformer that examples/train_vit.py trains on digits.
"""

from halfmesh import AMP_TYPE

bf16 = dict(mode=AMP_TYPE.TORCH)  # or the string "torch"
seed = 1024  # of the initial weights and the order of the data; the same on every rank

# Names in capitals are your own: halfmesh hands them through as config.NUM_EPOCHS and never looks at them.
NUM_EPOCHS = 20
BATCH_SIZE = 32  # images per data rank: with 2 ranks an update sees 64
LEARNING_RATE = 2e-3
WARMUP_EPOCHS = 2  # the learning rate rises from near 0 to LEARNING_RATE, then falls to 0
WEIGHT_DECAY = 0.05
ADAM_EPS = 1e-8  # torch's default
