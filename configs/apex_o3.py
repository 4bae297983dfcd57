"""Mode APEX, opt level O3: everything in fp16, without masters. A ceiling for speed, not a way to train.

Updates that are too small for an fp16 weight are lost, and what the optimizer keeps is fp16, too: Adam's squares of
small gradients round to zero there.
"""

from base import *

from halfmesh import AMP_TYPE

fp16 = dict(
    mode=AMP_TYPE.APEX,
    opt_level="O3",
    keep_batchnorm_fp32=True,  # apex's advice for O3: fp32 BatchNorm costs little, and cuDNN likes it
)
ADAM_EPS = 1e-4  # 1e-8 is zero in fp16, Adam divides by it, and halfmesh refuses that
