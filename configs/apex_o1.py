"""Mode APEX, opt level O1: fp32 weights; apex's lists decide which functions run in fp16, and which in fp32.

apex's default, and the level to begin with. Close to mode TORCH, but the lists are apex's on every device: on the CPU,
torch.autocast leaves softmax, sums and powers in fp16 that apex computes in fp32.
"""

from base import *

from halfmesh import AMP_TYPE

fp16 = dict(
    mode=AMP_TYPE.APEX,
    opt_level="O1",
    # loss_scale="dynamic" is O1's default: from 2**16, halved where a gradient overflows (that update is skipped),
    # doubled after 2000 updates without overflow. A number is a static scale, which never skips.
    min_loss_scale=1.0,  # apex has no floor by default, and a run that always overflows goes down without end
)
