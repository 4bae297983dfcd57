"""Mode NAIVE in fp16: the whole model in fp16, and an fp32 copy of the weights (the masters) for the optimizer.

    python examples/train_vit.py --config configs/naive_fp16.py
    python examples/train_vit.py --config configs/naive_fp16.py --set fp16=null --set bf16.mode=naive  # in bf16

The mode for large models: the model and its gradients take half the memory, and every operation runs in fp16. The
masters make up for its coarse steps: an update that is too small for an fp16 weight is not lost. In bf16 there is no
loss scale, and no key about it.
"""

from halfmesh import AMP_TYPE

fp16 = dict(
    mode=AMP_TYPE.NAIVE,  # or the string "naive"
    loss_scale="dynamic",  # a number would be a static scale, which never moves; inf or nan still skips an update
    initial_scale=2.0**16,  # torch_fp16.py says what a loss scale is
    backoff_factor=0.5,
    growth_factor=2.0,
    growth_interval=100,  # the default of 1000 suits long runs; this one has about 400 updates in all
    hysteresis=2,  # the second overflow lowers the scale: one bad batch alone does not
    min_scale=1.0,
    max_scale=2.0**32,
)

# Names in capitals are your own: halfmesh hands them through as config.NUM_EPOCHS and never looks at them.
NUM_EPOCHS = 20
BATCH_SIZE = 32  # images per data rank: with 2 ranks an update sees 64
LEARNING_RATE = 2e-3
WARMUP_EPOCHS = 2  # the learning rate rises from near 0 to LEARNING_RATE, then falls to 0
WEIGHT_DECAY = 0.05
ADAM_EPS = 1e-8  # torch's default
