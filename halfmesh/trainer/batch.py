"""Computes the loss and the output of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.engine import Engine
from ..engine.pipeline_handles import Handle
from ..errors import InputError, counted
from ..utils.tensors import count_rows

TARGETS = ("labels", "label", "targets", "target")
"""Keys of the criterion's target in a dict batch, in the order of the search (Hugging Face's is the first)."""


@dataclass(frozen=True)
class Outcome:
    """The result of one batch.

    Attributes:
        loss: the argument of `engine.backward`. In evaluation it may be None: the model has no loss, or it is on
            another stage.
        output: the model's output. Training under a pipeline needs `keep_outputs=True` to use it.
        target: the criterion's target, or None.
        rows: samples in the batch.
    """

    loss: Any
    output: Any
    target: Any
    rows: int

    @property
    def has_output(self) -> bool:
        """True if this rank has the output. With `eval_outputs="last"` only the last stage has it."""
        return not isinstance(self.output, Handle) or self.output.is_ready


Compute = Callable[[Engine, Any], Outcome]
"""Computes the Outcome of a batch. The trainer calls `backward` and `step`."""


def compute_batch(engine: Engine, batch: Any) -> Outcome:
    """The default: the last item of a tuple is the target, a dict is passed by name.

    | batch | calls |
    |---|---|
    | `(inputs..., target)` | `engine(*inputs)`, `engine.criterion(output, target)` |
    | dict, with a criterion | `engine(**rest)`, `engine.criterion(output, batch["labels"])` (or another of `TARGETS`) |
    | dict, no criterion | `engine(**batch)`, whose `.loss` or `["loss"]` is the loss |
    | a tensor, no criterion | `engine(batch)`, the same |

    Raises:
        InputError: the batch is none of these; give the Trainer another `compute`.
    """
    args, kwargs, target, needs_criterion = _split(engine, batch)
    output = engine(*args, **kwargs)
    if not engine.training and isinstance(output, Handle) and not output.is_ready:
        loss = None
    elif needs_criterion and (engine.training or engine.has_criterion):
        loss = engine.criterion(output, target)
    else:
        loss = _find_loss(engine, output)
    return Outcome(loss, output, target, count_rows(batch))


def _find_loss(engine: Engine, output: Any) -> Any:
    """The loss that the model computes; in evaluation there may be none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, torch.Tensor) and output.dim() == 0:
        loss = output
    if loss is None and engine.training:
        raise InputError(
            f"the model returned {type(output).__name__} without a loss, and initialize got no criterion; give "
            "initialize a criterion, or put the labels that the model's loss needs into the batch"
        )
    return loss


def _split(engine: Engine, batch: Any) -> tuple[Sequence[Any], Mapping[str, Any], Any, bool]:
    """The positional and named arguments of the model, the target, and whether it is the criterion's."""
    if isinstance(batch, (tuple, list)):
        if len(batch) < 2:
            raise InputError(
                f"a batch of {counted(len(batch), 'item')} has no target; return (input, target) from the dataset, or "
                "give the Trainer compute=f, where f(engine, batch) returns halfmesh.Outcome(loss, output, target, "
                "rows)"
            )
        return batch[:-1], {}, batch[-1], True
    if not isinstance(batch, Mapping):
        return (batch,), {}, None, False
    key = next((key for key in TARGETS if key in batch), None)
    if not engine.has_criterion:
        return (), batch, None if key is None else batch[key], False
    if key is None:
        raise InputError(
            f"a batch with the keys {', '.join(map(repr, batch))} has no target for the criterion; name it "
            f"{' or '.join(map(repr, TARGETS))}, or give the Trainer your own compute"
        )
    return (), {name: value for name, value in batch.items() if name != key}, batch[key], True
