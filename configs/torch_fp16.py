"""Mode TORCH in fp16: torch.autocast decides per operation, the parameters stay in fp32.

The mode to begin with: it changes a model least. Matrix products run in fp16; operations that need range or accuracy
(softmax, norms, losses) run in fp32. It costs memory: parameters, gradients and optimizer state are all in fp32.
"""

from base import *

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
