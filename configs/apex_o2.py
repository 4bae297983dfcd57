"""Mode APEX, opt level O2: the model in fp16, but for BatchNorm; fp32 masters for the optimizer.

Mode NAIVE is the same with keep_batchnorm_fp32=False. (The model that examples/train_vit.py trains has no BatchNorm.)
"""

from base import *

from halfmesh import AMP_TYPE

fp16 = dict(
    mode=AMP_TYPE.APEX,
    opt_level="O2",
    keep_batchnorm_fp32=True,  # O2's default: weights and running statistics of BatchNorm stay in fp32
    min_loss_scale=1.0,  # see apex_o1.py
)
