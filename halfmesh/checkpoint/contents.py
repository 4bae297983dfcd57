"""What a rank holds of the model and of the optimizer's state, under the names of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.originals import current_value
from ..division import Division
from ..errors import InputError, shorten
from ..parallel.regions import Placement, whole
from ..shard import ParamShard, compute_dtype

if TYPE_CHECKING:
    from ..engine.average import WeightAverage

MODEL = "model."
STATE = "optimizer."
"""Optimizer state with an element for each of the parameter's: `optimizer.exp_avg.blocks.0.weight`."""
COUNTERS = "counters."
"""Other tensors of its state, which every rank has whole: `counters.step.blocks.0.weight`."""
AVERAGE = "average."
"""The moving average of a parameter: `average.blocks.0.weight`."""


@dataclass(frozen=True)
class Piece:
    """What this rank holds of one tensor, and where in the whole tensor that lies."""

    held: torch.Tensor
    placement: Placement


Pieces = dict[str, Piece]

_SAME_ON_ALL = (bool, int, float, str, type(None))
"""State that is one value for all of a parameter, which ranks that hold parts of it can compare."""


@dataclass(frozen=True)
class Holding:
    """What an engine's state is collected from."""

    model: nn.Module
    update: MixedPrecisionOptimizer
    division: Division
    average: WeightAverage | None = None

    def names(self) -> list[tuple[ParamShard, str]]:
        """Every parameter of this rank, with its first name in the whole model."""
        first = self.division.first_names(self.model)
        return [(shard, first.get(shard.name, shard.name)) for shard in self.update.master_weights.shards]

    def trained(self) -> list[tuple[ParamShard, str]]:
        """Of these, what the optimizer holds."""
        held = {id(shard) for shard in self.update.master_weights.trained}
        return [(shard, name) for shard, name in self.names() if id(shard) in held]

    @torch.no_grad()
    def weights(self) -> Pieces:
        """The model's parameters and buffers in full precision: masters where there are any, others in the dtype that
        they came with. Not copied where that is what is held."""
        state = self.model.state_dict()
        masters = self.update.master_weights.masters
        found: Pieces = {}
        for shard, name in self.names():
            if shard.param in masters:
                value = current_value(shard.param, masters[shard.param])
            elif shard.source is None and isinstance(state.get(shard.name), torch.Tensor):
                value = state[shard.name]
            else:
                value = shard.param
            found[name] = Piece(value.detach(), self.division.placement(shard))
        for name, key in self._buffers(state):
            found[name] = Piece(state[key].detach(), whole(state[key].shape))
        return found

    def weight_targets(self) -> Pieces:
        """Where new weights have to be written: in full precision where the model has them rounded, else the model
        itself. `loading.tell` follows."""
        masters, originals = self.update.master_weights.masters, self.update.master_weights.originals
        found = {
            name: Piece(
                masters[shard.param].detach() if shard.param in masters else originals.target(shard.param),
                self.division.placement(shard),
            )
            for shard, name in self.names()
        }
        own = dict(self.model.named_buffers(remove_duplicate=False))
        for name, key in self._buffers(self.model.state_dict()):
            found[name] = Piece(originals.target(own[key]), whole(own[key].shape))
        return found

    def in_fp16(self) -> set[str]:
        """The names of what the model computes with in fp16, which ends at 65504."""
        found = {
            name
            for shard, name in self.names()
            if compute_dtype(shard.param if shard.source is None else shard.source.param) == torch.float16
        }
        own = dict(self.model.named_buffers(remove_duplicate=False))
        return found | {n for n, key in self._buffers(self.model.state_dict()) if own[key].dtype == torch.float16}

    def averages(self) -> Pieces:
        """The moving average of the weights, if there is one, as far as the optimizer holds them."""
        values = {} if self.average is None else self.average.values
        return {
            AVERAGE + name: Piece(values[shard], self.division.placement(shard))
            for shard, name in self.trained()
            if shard in values
        }

    def written(self) -> list[torch.Tensor]:
        """What new weights of the optimizer's parameters are written into; under zero1 also what `tell` brings from
        other ranks."""
        masters = self.update.master_weights
        found = [masters.target(shard).detach() for shard in masters.trained]
        if self.division.slices is not None:
            found += [shard.source.param.detach() for shard in masters.trained if shard.source is not None]
        return found

    @torch.no_grad()
    def tell(self, others: bool = True) -> None:
        """The weights of the optimizer's parameters are new: to the model, and to ranks that use them.

        Args:
            others: False does without a message to other ranks.
        """
        masters = self.update.master_weights
        masters.originals.publish()
        masters.publish(masters.trained)
        if others or self.division.slices is None:
            self.division.publish(masters.trained)
        masters.mark_published()

    def extras(self) -> dict[str, Any]:
        """What modules add to the model's state dict besides parameters and buffers (`get_extra_state`)."""
        return {key: value for key, value in self.model.state_dict().items() if _is_extra(key)}

    def set_extras(self, extras: dict[str, Any]) -> None:
        """Undo `extras`, for the modules that this rank has."""
        for key in self.extras().keys() & extras.keys():
            self.model.get_submodule(key.rpartition(".")[0]).set_extra_state(extras[key])

    def _buffers(self, state: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """The first name of each buffer in `state`, and its name there."""
        first = self.division.first_names(self.model)
        params = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        done: set[str] = set()
        for key, value in state.items():
            name = first.get(key, key)
            if isinstance(value, torch.Tensor) and key not in params and not _is_extra(key) and name not in done:
                done.add(name)
                yield name, key

    def optimizer_state(self) -> tuple[Pieces, dict[str, dict[str, Any]]]:
        """The tensors of the optimizer's state; and the rest, by parameter and key.

        Raises:
            InputError: state that has no place in a checkpoint: of another shape than the parameter's, of which this
                rank holds a part; of no parameter; under a name that is none.
        """
        masters, pieces = self.update.master_weights, Pieces()
        _refuse_own_entries(masters.optimizer)
        plain: dict[str, dict[str, Any]] = {}
        for shard, name in self.trained():
            target, placement = masters.target(shard), self.division.placement(shard)
            for key, value in masters.optimizer.state.get(target, {}).items():
                if type(key) is not str or "." in key:
                    raise InputError(
                        f"{type(masters.optimizer).__name__} keeps state of {name} under {key!r}, which cannot be "
                        "saved: names of state are text without a dot; rename it in the optimizer"
                    )
                if not isinstance(value, torch.Tensor):
                    if not placement.is_whole and not isinstance(value, _SAME_ON_ALL):
                        raise InputError(
                            f"{type(masters.optimizer).__name__} keeps a {type(value).__name__} as state {key!r} of "
                            f"{name}, of which this rank holds a part: which part of the state that is is not known, "
                            "so it cannot be saved; use an optimizer that keeps tensors and numbers, such as AdamW, or "
                            "data='replicate' with tensor=1"
                        )
                    plain.setdefault(name, {})[key] = value
                elif value.shape == target.shape and key != "step":
                    pieces[f"{STATE}{key}.{name}"] = Piece(value.detach(), placement)
                elif placement.is_whole or value.numel() == 1:
                    pieces[f"{COUNTERS}{key}.{name}"] = Piece(value.detach(), whole(value.shape))
                else:
                    raise InputError(
                        f"the optimizer's state {key!r} of {name} has shape {tuple(value.shape)}, and this rank holds "
                        f"{tuple(target.shape)} of the parameter's {placement.shape}: which part of the state that is "
                        "is not known, so it cannot be saved; use an elementwise optimizer, such as AdamW, or "
                        "data='replicate' with tensor=1"
                    )
        return pieces, plain

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups with names of parameters, as far as this rank holds them."""
        masters = self.update.master_weights
        names = {id(masters.target(shard)): name for shard, name in self.trained()}
        return [
            {**group, "params": [names[id(param)] for param in group["params"]]}
            for group in masters.optimizer.param_groups
        ]


def _refuse_own_entries(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError if `optimizer` has state besides that of its parameters: nothing says how ranks share it."""
    own = [repr(key) for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor) and value]
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        own += [repr(key) for key in optimizer.state_dict() if key not in ("state", "param_groups")]
    if own:
        raise InputError(
            f"{type(optimizer).__name__} keeps state of no parameter, {shorten(own)}, which cannot be saved; keep it "
            "in the state of each parameter or in the groups, or save engine.state_dict() yourself"
        )


def refuse_differing(optimizer: torch.optim.Optimizer, by_rank: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """Raise InputError if numbers of the optimizer's state, as `Holding.optimizer_state` gives them, differ by rank."""
    seen: dict[tuple[str, str], Any] = {}
    for name, key, value in ((n, k, v) for plain in by_rank for n, state in plain.items() for k, v in state.items()):
        first = seen.setdefault((name, key), value)
        if isinstance(value, _SAME_ON_ALL) and repr(first) != repr(value):  # nan is itself
            raise InputError(
                f"{type(optimizer).__name__} keeps {key!r} of {name}, which is {first!r} on one rank and {value!r} on "
                "another, so it cannot be saved; use an elementwise optimizer, such as AdamW, or data='replicate' with "
                "tensor=1"
            )


def join_groups(by_rank: Sequence[list[list[str]]]) -> list[list[str]]:
    """The parameters of each group in the whole model, from those that each rank holds."""
    groups = max(len(groups) for groups in by_rank)
    return [
        list(dict.fromkeys(name for ranks in by_rank if index < len(ranks) for name in ranks[index]))
        for index in range(groups)
    ]


def without_empty(pieces: Pieces) -> Pieces:
    """Those of `pieces` of which the whole tensor has elements."""
    return {name: piece for name, piece in pieces.items() if 0 not in piece.placement.shape}


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == "_extra_state"
