"""apex.amp: the arguments of `amp.initialize`."""

from __future__ import annotations

from typing import Any

from .convert import Origin
from .outcome import Converted, Rule, done, to
from .source import Source

OPTIONS = (
    *("enabled", "opt_level", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights"),
    *("loss_scale", "cast_model_outputs", "num_losses", "verbosity", "min_loss_scale", "max_loss_scale"),
)
"""The options, which are those of `fp16 = dict(mode="apex")`, with the same defaults."""
POSITIONAL = ("models", "optimizers", *OPTIONS)
"""The parameters of `amp.initialize`, in order."""


def _num_losses(value: Any, source: Source) -> Converted:
    look = "give engine.backward the loss_id that amp.scale_loss had" if value != 1 else ""
    return Converted({"fp16.num_losses": value}, look=look)


RULES: dict[str, Rule] = {
    "models": done("the model that halfmesh.initialize is given"),
    "optimizers": done("the optimizer that halfmesh.initialize is given"),
    **{name: to(f"fp16.{name}") for name in OPTIONS},
    "num_losses": Rule(_num_losses),
}

APEX = Origin(
    title="apex.amp.initialize",
    rules=RULES,
    defaults=lambda source: {"fp16.mode": "apex"},
    looks=lambda source: (
        "mode 'apex' is apex's contract, for one process or plain data parallelism. mode='torch' is close to O1, and "
        "mode='naive' is O2 with keep_batchnorm_fp32=False; both go with every layout.",
    ),
)
