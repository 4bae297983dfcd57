"""All faults."""

from .batches import CONTEXT, DATA_FAULTS, EXPERT_FAULTS, SHARDED
from .checkpoint import CHECKPOINT, FLOAT8_FAULTS
from .fault import Fault
from .layers import PIPELINE, TENSOR
from .update import ACTIVATIONS, NORM_AND_SCALE, SEVERAL_OPTIMIZERS, WEIGHTS
from .users import USERS

SUBJECTS = (TENSOR, PIPELINE, CONTEXT, EXPERT_FAULTS, DATA_FAULTS, SHARDED, NORM_AND_SCALE, WEIGHTS)
SUBJECTS += (SEVERAL_OPTIMIZERS, ACTIVATIONS, CHECKPOINT, FLOAT8_FAULTS, USERS)
FAULTS = [Fault.of(what, given) for subject in SUBJECTS for what, given in subject.items()]
TESTS = tuple(dict.fromkeys(test for fault in FAULTS for test in fault.tests))
"""Those that have to see some."""
