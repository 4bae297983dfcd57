"""Mode APEX, opt level O1: fp32 weights; apex's lists decide which functions run in fp16, and which in fp32.

    python examples/train_vit.py --config configs/apex.py
    python examples/train_vit.py --config configs/apex.py --set fp16.opt_level=O2

O1 is apex's default, and the level to begin with. O2 holds the model in fp16, but for BatchNorm, with fp32 masters;
mode NAIVE is close to it. O0 is fp32. O3 holds everything in fp16: a ceiling for speed, not a way to train (Adam's
eps has to be larger there: --set ADAM_EPS=1e-4).
"""

from halfmesh import AMP_TYPE

fp16 = dict(
    mode=AMP_TYPE.APEX,
    opt_level="O1",
    # loss_scale="dynamic" is the default of O1 and O2: from 2**16, halved where a gradient overflows (that update is
    # skipped), doubled after 2000 updates without overflow. A number is a static scale, which never skips.
    min_loss_scale=1.0,  # apex has no floor by default, and a run that always overflows goes down without end
)

# Names in capitals are your own: halfmesh hands them through as config.NUM_EPOCHS and never looks at them.
NUM_EPOCHS = 20
BATCH_SIZE = 32  # images per data rank: with 2 ranks an update sees 64
LEARNING_RATE = 2e-3
WARMUP_EPOCHS = 2  # the learning rate rises from near 0 to LEARNING_RATE, then falls to 0
WEIGHT_DECAY = 0.05
ADAM_EPS = 1e-8  # torch's default
