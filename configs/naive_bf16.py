"""Mode NAIVE in bf16: the whole model in bf16, and fp32 masters for the optimizer.

bf16 has the range of fp32, so there is no loss scale. It has only 8 bits of precision: without the masters, an update
smaller than about 1/256 of a weight would be lost.
"""

from base import *

from halfmesh import AMP_TYPE

bf16 = dict(mode=AMP_TYPE.NAIVE)
