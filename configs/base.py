"""What all example configs share. It says how to train, not in which precision: that is what the others are for.

A config is an ordinary Python file. Lower-case names are halfmesh's settings, each with a default, and an unknown one
is refused. UPPERCASE names are your own: halfmesh hands them through as `config.NUM_EPOCHS` and never looks at them.
The values here suit the small Vision Transformer that `examples/train_vit.py` trains on digits.
"""

NUM_EPOCHS = 20
BATCH_SIZE = 32  # images per data rank: with 2 ranks an update sees 64
LEARNING_RATE = 2e-3
WARMUP_EPOCHS = 2  # the learning rate rises from near 0 to LEARNING_RATE, then falls to 0
WEIGHT_DECAY = 0.05
ADAM_EPS = 1e-8  # torch's default

seed = 1024  # of the initial weights and the order of the data; the same on every rank
