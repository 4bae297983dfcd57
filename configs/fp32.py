"""Full precision: neither `fp16` nor `bf16` is set. The run to compare the others with."""

from base import *
