"""Running statistics of BatchNorm that do not fit into fp16."""

from __future__ import annotations

import torch
from torch import nn

from .._torch import RUNNING_STATISTICS
from ..errors import shorten
from ..log import get_logger
from .recipe import Recipe

_log = get_logger(__name__)


class StatisticsCheck:
    """Warns, once, of running statistics that have become inf or nan: evaluation uses them, and training does not.

    Args:
        speaks: whether this rank does; others have the same statistics.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, speaks: bool) -> None:
        self._model = model if recipe.param_dtype == torch.float16 and speaks else None

    def look(self) -> None:
        """Look at those in fp16. Reads the host, once for all of them, so not to be called in a step."""
        if self._model is None:
            return
        held = {
            f"{name}.{kind}".lstrip("."): statistic
            for name, module in self._model.named_modules()
            if isinstance(module, RUNNING_STATISTICS)
            for kind in ("running_mean", "running_var")
            if (statistic := getattr(module, kind)) is not None and statistic.dtype == torch.float16
        }
        fine = torch.stack([one.isfinite().all() for one in held.values()]).tolist() if held else []
        bad = [name for name, is_fine in zip(held, fine, strict=True) if not is_fine]
        if bad:
            self._model = None
            _log.warning(
                "%s hold inf or nan: fp16 ends at 65504, which is the variance of values beyond 256. Evaluation with "
                "these statistics is wrong, and more training does not repair them. Normalize the model's inputs "
                "(images to mean 0 and standard deviation 1), or use bf16, mode='torch', or mode='apex' with "
                "opt_level='O2', which keeps BatchNorm in float32",
                shorten(bad),
                ranks=None,
            )
