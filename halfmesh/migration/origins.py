"""The engines whose configs are understood."""

from __future__ import annotations

from types import MappingProxyType

from .from_accelerate import ACCELERATE
from .from_apex import APEX
from .from_colossal import COLOSSAL
from .from_deepspeed import DEEPSPEED
from .from_sagemaker import SAGEMAKER

ORIGINS = MappingProxyType(
    {"colossal": COLOSSAL, "apex": APEX, "sagemaker": SAGEMAKER, "deepspeed": DEEPSPEED, "accelerate": ACCELERATE}
)
"""By the name that --from takes."""
