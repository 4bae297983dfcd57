"""Mode APEX, opt level O0: fp32 throughout, by the rules of NVIDIA's apex.amp. What the other levels are compared with.

All four levels and what apex's calls are now: docs/migration/apex.md.
"""

from base import *

from halfmesh import AMP_TYPE

fp16 = dict(mode=AMP_TYPE.APEX, opt_level="O0")  # the letter O, not the number zero
