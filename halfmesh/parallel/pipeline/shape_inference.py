"""A model without memory, from which every rank learns what is sent between stages that other ranks have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..._torch import DATA_NEEDED
from ...errors import InputError, shorten
from ...tensors import map_tensors
from ..modules import meta_copy
from .fx_trace import run_without_data
from .partition import Partition
from .pieces import Call
from .stage import ForwardContext


class MetaModel:
    """A copy of a whole model on the meta device.

    Args:
        model: whole; its layers may be divided over a tensor group.

    Attributes:
        model: the copy.

    Raises:
        InputError: something in the model cannot be copied.
    """

    def __init__(self, model: nn.Module) -> None:
        try:  # frozen parameters too get gradients: they may be unfrozen, of which ranks without them do not hear
            self.model = meta_copy(model, model)
        except Exception as error:
            raise InputError(
                f"the model cannot be copied ({error}), which a pipeline needs to know the shapes between its stages; "
                "take out of the model what copy.deepcopy refuses"
            ) from error

    def infer(
        self, partition: Partition, call: Call, source: nn.Module, device: torch.device, context: ForwardContext
    ) -> list[Any]:
        """What each stage returns when the model is called so. Nothing is computed, and nothing sent.

        Args:
            call: as on this device, or with other tensors of the same shapes.
            source: the model that runs, whose modules may be in training mode or not.
            context: what the stages' forward runs in.

        Raises:
            InputError: the forward asks for values.
        """
        self._follow(source)
        for stage in partition.stages:
            for piece in stage:
                if piece.prepare is not None:
                    piece.prepare(self.model, call)
        with _without_data():
            trees = run_without_data(_Stages(self.model, partition, context), device, call.args, dict(call.kwargs))
        return [map_tensors(_without_memory, tree) for tree in trees]

    def _follow(self, source: nn.Module) -> None:
        """Take over what may have changed in the model.

        Raises:
            InputError: it has other modules than at first.
        """
        here, there = dict(self.model.named_modules()), dict(source.named_modules())
        changed = sorted(here.keys() ^ there.keys())
        if changed:
            raise InputError(
                f"{shorten(changed)}: modules that were added to the model after initialize, or taken away; under a "
                "pipeline each rank holds its stages of the model as it was then. Change it before initialize (a layer "
                "may be frozen, and unfrozen later), or close the engine, change the model, and initialize again"
            )
        for mine, theirs in zip(self.model.modules(), source.modules(), strict=True):
            for name, value in vars(theirs).items():
                if isinstance(value, (bool, int, float, str)):
                    vars(mine)[name] = value


class _Stages(nn.Module):
    """All stages, one after the other, on one rank."""

    def __init__(self, model: nn.Module, partition: Partition, context: ForwardContext) -> None:
        super().__init__()
        self.model = model
        self._partition = partition
        self._context = context

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        activations, trees = None, []
        before = {name for name, _ in self._attributes()}  # such as the weight that weight_norm computes
        for stage in self._partition.stages:
            call = Call(args, kwargs)
            with self._context.autocast():
                for piece in stage:
                    activations = piece.run(self.model, call, activations)
            trees.append(activations)
            activations = map_tensors(_receive, activations)
        for name, value in self._attributes():
            if name not in before and value.requires_grad and not value.is_leaf:
                raise InputError(
                    f"{name} is kept on the model with its graph, for a loss term perhaps, which would reach what "
                    "other stages keep as little as their parameters; return it as a part of the output, or keep it "
                    "detached"
                )
        return trees

    def _attributes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that modules keep, which are neither parameters nor buffers."""
        for path, module in self.model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    yield ".".join(filter(None, (path, name))), value


def _receive(tensor: torch.Tensor) -> torch.Tensor:
    """As the next stage gets it: contiguous, and no leaf, so that it may be changed in place."""
    received = tensor.detach().contiguous()
    return received.requires_grad_().clone() if tensor.requires_grad else received


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


@contextmanager
def _without_data() -> Iterator[None]:
    try:
        yield
    except DATA_NEEDED as error:
        raise InputError(
            "the model's forward asks for the values of its activations (.item(), if, boolean indexing), but what "
            f"is sent between stages has to be known from shapes alone: {str(error).splitlines()[0]}"
        ) from error
    except RuntimeError as error:
        raise InputError(
            f"the model's forward failed where it was run on tensors without data, to find the shapes between its "
            f"stages: {str(error).splitlines()[0]}"
        ) from error
