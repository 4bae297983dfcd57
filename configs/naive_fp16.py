"""Mode NAIVE in fp16: the whole model in fp16, and an fp32 copy of the weights (the masters) for the optimizer.

The mode for large models: the model and its gradients take half the memory, and every operation runs in fp16. The
masters make up for its coarse steps: an update that is too small for an fp16 weight is not lost.
"""

from base import *

from halfmesh import AMP_TYPE

fp16 = dict(
    mode=AMP_TYPE.NAIVE,  # or the string "naive"
    loss_scale="dynamic",  # a number would be a static scale, which never moves and never skips an update
    initial_scale=2.0**16,  # see torch_fp16.py for what a loss scale is
    backoff_factor=0.5,
    growth_factor=2.0,
    growth_interval=100,  # the default of 1000 suits long runs; this one has about 400 updates in all
    hysteresis=2,  # the second overflow lowers the scale: one bad batch alone does not
    min_scale=1.0,
    max_scale=2.0**32,
)
