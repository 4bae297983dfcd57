"""Functions for a model's forward that use less memory than torch's.

| function | file |
|---|---|
| a language model's loss without the logits of all tokens at once | `loss.py` |
"""

from .loss import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
