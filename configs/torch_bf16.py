"""Mode TORCH in bf16: torch.autocast with a format that has the range of fp32 and 8 bits of precision.

Nothing overflows, so there is no loss scale and no skipped update; keys about the scale are refused. Prefer it to
fp16 where the device has it (NVIDIA GPUs from Ampere on, and recent CPUs).
"""

from base import *

from halfmesh import AMP_TYPE

bf16 = dict(mode=AMP_TYPE.TORCH)
