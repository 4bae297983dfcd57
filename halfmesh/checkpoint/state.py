"""Collects a rank's shards of the model and of the optimizer's state, under the names of the full model."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from ..amp.optimizer import MixedPrecisionOptimizer
from ..distributed.env import list_ranks
from ..errors import InputError, shorten
from ..parallel.mesh import ParallelContext
from ..parallel.shard_spec import Placement, Shape, whole
from ..utils.optimizer_state import kinds_of, parts_of, saved_state
from ..utils.param_shard import ParamShard
from ..utils.tensors import is_compound
from .full_state import Distinct, JoinedForms, WholeTensor, find_tensors, join_groups
from .validate import IMPLEMENTATION, class_name

if TYPE_CHECKING:
    from ..engine.ema import WeightAverage
    from ..engine.parallelize import ParallelModel

MODEL = "model."
STATE = "optimizer."
"""Optimizer state shaped like its parameter: `optimizer.exp_avg.blocks.0.weight`."""
COUNTERS = "counters."
"""Other optimizer tensors, which every rank replicates: `counters.step.blocks.0.weight`."""
AVERAGE = "average."
"""The moving average of a parameter or buffer: `average.blocks.0.weight`."""


@dataclass(frozen=True)
class TensorShard:
    """This rank's shard of one tensor, and its position in the full tensor."""

    tensor: torch.Tensor
    placement: Placement

    def box(self, at: Shape) -> torch.Tensor:
        """A view of the box that begins `at` in the full tensor."""
        return next(region for region in self.placement.regions if region.at == at).view(self.tensor)


Shards = dict[str, TensorShard]
Boxes = dict[tuple[str, Shape], torch.Tensor]
"""Boxes of full tensors, by name and first index."""


def describe(shards: Shards) -> dict[str, Any]:
    """Shape, dtype and boxes of a rank's shards, for the other ranks."""
    boxes = {name: [(r.at, r.sizes) for r in shard.placement.regions] for name, shard in shards.items()}
    return {name: (shard.placement.shape, shard.tensor.dtype, boxes[name]) for name, shard in shards.items()}


class FullState(NamedTuple):
    """The state of the full model, of which this rank holds shards.

    Attributes:
        shards: this rank's, by the name of the full tensor.
        tensors: the full tensors; to save, with all of their boxes on rank 0, and on other ranks those that they write.
        written: name and first index of the boxes that this rank writes.
        extras: the entries that modules add to the model's state dict with `get_extra_state`.
        plain: the optimizer's state that is not in tensors, by parameter and key.
        groups: the optimizer's groups, with the names of their parameters.
    """

    shards: Shards
    tensors: dict[str, WholeTensor]
    written: list[tuple[str, Shape]]
    extras: dict[str, Any]
    plain: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]


@dataclass(frozen=True)
class ShardedState:
    """Collects an engine's state, and gives the memory to load it into."""

    model: nn.Module
    update: MixedPrecisionOptimizer
    parallel_model: ParallelModel
    average: WeightAverage
    saved: JoinedForms = field(default_factory=JoinedForms)

    def collect(
        self, context: ParallelContext, what: str, optimizer: bool = False, to_save: bool = False, to_load: bool = False
    ) -> FullState:
        """The full weights, and the optimizer's groups; nothing is copied or sent. All ranks together.

        Args:
            what: the beginning of an error message.
            optimizer: include the optimizer's state.
            to_save: include the average, leave out tensors without elements (DCP does not find them), and spread
                replicated boxes over the ranks that hold them.
            to_load: collect the tensors of `weight_targets`, for their shapes.

        Raises:
            InputError: a rank has state that cannot be saved, or the ranks' weights differ. All ranks raise it.
        """
        shards, groups = Shards(), list[dict[str, Any]]()
        if not to_load and (diverged := self.parallel_model.data.diverged):
            raise InputError(f"{what}: {diverged}")

        def describe_own() -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
            plain = dict[str, dict[str, Any]]()
            self.update.follow_groups()  # groups added since the last step
            groups.extend(self.groups())
            weights = self.weight_targets() if to_load else self.weights()
            shards.update({MODEL + name: shard for name, shard in weights.items()})
            if optimizer:
                of_optimizer, plain = self.optimizer_state()
                shards.update(of_optimizer)
            if to_save:
                shards.update(self.averages())
            described = describe(without_empty(shards) if to_save else shards)
            form = described, [group["params"] for group in groups], self.average.decay is not None
            return form, (self.extras(), plain)

        def join(by_rank: Distinct) -> tuple[Any, ...]:
            shapes, names, averages = ([(ranks, form[n]) for ranks, form in by_rank] for n in range(3))
            having = [rank for ranks, has in averages if has for rank in ranks]
            if to_save and 0 < len(having) < context.size:  # each rank has its shards of the average
                raise InputError(f"engine.averaged_model was called on {list_ranks(having)} only; call it on all")
            tensors = find_tensors(shapes, spread=to_save)
            own = {name: [box for box in tensor.boxes if box.rank == context.rank] for name, tensor in tensors.items()}
            if to_save and context.rank != 0:  # only rank 0 writes the index of all
                tensors = {name: tensor._replace(boxes=own[name]) for name, tensor in tensors.items()}
            return tensors, [(name, box.at) for name, boxes in own.items() for box in boxes], join_groups(names)

        joined = self.saved if to_save else JoinedForms()  # saves repeat
        (tensors, written, names), rests = joined.gather(context, what, describe_own, join)
        extras = {key: value for own, _ in reversed(rests) for key, value in own.items()}
        plain = {key: value for _, own in reversed(rests) for key, value in own.items()}
        groups = [group | {"params": params} for group, params in zip(groups, names, strict=True)]
        return FullState(shards, tensors, written, extras, plain, groups)

    # -- weights -----------------------------------------------------------------------------------------------

    def names(self) -> list[tuple[ParamShard, str]]:
        """Every parameter of this rank, with its first name in the full model (of tied weights)."""
        first = self.parallel_model.first_names(self.model)
        return [(shard, first.get(shard.name, shard.name)) for shard in self.update.master_weights.shards]

    def trained(self) -> list[tuple[ParamShard, str]]:
        """Those of `names` that the optimizer holds."""
        held = {id(shard) for shard in self.update.master_weights.trained}
        return [(shard, name) for shard, name in self.names() if id(shard) in held]

    @torch.no_grad()
    def weights(self) -> Shards:
        """The model's parameters and buffers in full precision: masters where there are any, others in their original
        dtype. Copied only if they are held in another form."""
        self.update.sync_writes()
        with self.update.master_weights.joined(writes=False):  # both are the same memory
            state = self.model.state_dict()
            masters = self.update.master_weights.by_name()
        found: Shards = {}
        for shard, name in self.names():
            value = masters.get(shard.name, None if shard.source is not None else state.get(shard.name))
            if not isinstance(value, torch.Tensor):
                value = shard.param
            found[name] = TensorShard(value.detach(), self.parallel_model.placement(shard))
        for name, key in self._buffers(state).items():
            found[name] = TensorShard(state[key].detach(), whole(state[key].shape))
        return found

    def weight_targets(self) -> Shards:
        """The tensors to write new weights into, in full precision: masters, which must be `joined`, originals, or
        the model's. `publish` follows."""
        masters, originals = self.update.master_weights.masters, self.update.master_weights.originals
        found: Shards = {}
        for shard, name in self.names():
            held = masters[shard.param].detach() if shard.param in masters else originals.target(shard.param)
            found[name] = TensorShard(held, self.parallel_model.placement(shard))
        own = dict(self.model.named_buffers(remove_duplicate=False))
        for name, key in self._buffers(self.model.state_dict()).items():
            found[name] = TensorShard(originals.target(own[key]), whole(own[key].shape))
        return found

    def written(self) -> list[torch.Tensor]:
        """The tensors that averaged weights overwrite: those that hold what is averaged and, under zero1, the
        model's weights, shards of which other ranks step."""
        masters = self.update.master_weights
        found = [held for source in self.average.sources().values() for held in masters.held(source)]
        if self._gets_weights:
            found += [shard.source.param.detach() for shard in masters.trained if shard.source is not None]
        return found

    @torch.no_grad()
    def publish(self, others: bool = True) -> None:
        """Copy new weights of the optimizer's parameters to the model and, with `others`, to ranks that use them."""
        masters = self.update.master_weights
        masters.originals.publish()
        masters.publish(masters.trained)
        if others or not self._gets_weights:
            self.parallel_model.publish(masters.trained)
        masters.mark_published(masters.trained)

    @property
    def _gets_weights(self) -> bool:
        """True if the model has full weights of which other ranks step shards (zero1)."""
        return self.parallel_model.data.shards_state and not self.parallel_model.data.shards_model

    def averages(self) -> Shards:
        """The moving average of the weights, if there is one."""
        return {
            name: TensorShard(value, whole(value.shape) if isinstance(key, str) else self.parallel_model.placement(key))
            for name, key in self.average_keys().items()
            if (value := self.average.values.get(key)) is not None
        }

    def average_keys(self) -> dict[str, ParamShard | str]:
        """The keys of `WeightAverage.values` by their names in a checkpoint."""
        found: dict[str, ParamShard | str] = {AVERAGE + name: shard for shard, name in self.trained()}
        buffers = self._buffers(self.model.state_dict()) if self.average.buffers else {}
        return found | {AVERAGE + name: key for name, key in buffers.items() if key in self.average.buffers}

    def average_targets(self, saved: Mapping[str, Any]) -> Shards:
        """Memory for the average of a checkpoint with tensors of the names `saved`, if it has one."""
        average = self.average
        if any(name.startswith(AVERAGE) for name in saved):
            if average.decay is None:  # it may be continued later
                buffers = self._buffers(self.model.state_dict())
                average.buffers = [key for name, key in buffers.items() if AVERAGE + name in saved]
            for key, source in average.sources().items():
                average.make(key, source)
        return {name: shard for name, shard in self.averages().items() if name in saved}

    def float_buffers(self) -> list[str]:
        """Names of the floating-point buffers in this rank's state dict."""
        state = self.model.state_dict()
        return [key for key in self._buffers(state).values() if state[key].is_floating_point()]

    def extras(self) -> dict[str, Any]:
        """The entries that modules add to the model's state dict with `get_extra_state`."""
        state = self.model.state_dict()
        return {key: value for key, value in state.items() if key.rpartition(".")[2] == "_extra_state"}

    def _buffers(self, state: dict[str, Any]) -> dict[str, str]:
        """For the first name of each buffer in `state`, the model's state dict, its name there."""
        first, found = self.parallel_model.first_names(self.model), dict[str, str]()
        for key, _ in self.model.named_buffers(remove_duplicate=False):
            if key in state:
                found.setdefault(first.get(key, key), key)
        return found

    # -- the optimizer -----------------------------------------------------------------------------------------

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the names of this rank's parameters."""
        masters = self.update.master_weights
        names = {id(masters.target(shard)): name for shard, name in self.trained()}
        groups = masters.optimizer.param_groups
        return [{**group, "params": [names[id(param)] for param in group["params"]]} for group in groups]

    def optimizer_state(self) -> tuple[Shards, dict[str, dict[str, Any]]]:
        """The tensors of the optimizer's state; and the rest, by parameter and key. Raises InputError for state whose
        position in the full model is unknown."""
        masters, shards = self.update.master_weights, Shards()
        optimizer, kind = masters.optimizer, kinds_of(masters.optimizer)
        state = saved_state(optimizer)
        own = [repr(key) for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor) and value]
        for part in parts_of(optimizer):
            if type(part).state_dict is not torch.optim.Optimizer.state_dict:
                own += [repr(key) for key in part.state_dict() if key not in ("state", "param_groups")]
        if own:
            raise InputError(f"{kind} keeps state of no parameter, {shorten(own)}; keep it in the param_groups")
        plain: dict[str, dict[str, Any]] = {}
        for name, (shard, placement) in self._stepped().items():
            target = masters.target(shard)
            shape = placement.shape if placement.is_whole else target.shape
            for key, value in state.get(target, {}).items():
                is_tensor = isinstance(value, torch.Tensor)
                if is_tensor and value.shape == shape and key != "step" and not is_compound(value):
                    shards[f"{STATE}{key}.{name}"] = TensorShard(value.detach(), placement)
                elif is_tensor and (placement.is_whole or value.numel() == 1):
                    for inner, tensor in split_compound(key, value, plain.setdefault(name, {})):
                        shards[f"{COUNTERS}{inner}.{name}"] = TensorShard(tensor, whole(tensor.shape))
                elif not is_tensor and (placement.is_whole or isinstance(value, (Number, str, type(None)))):
                    plain.setdefault(name, {})[key] = value
                else:
                    problem = f"{kind} keeps a {type(value).__name__} as state {key!r} of {name}, a shard"
                    raise InputError(f"{problem}; use an optimizer whose state has the parameter's shape")
        return shards, plain

    def _stepped(self) -> dict[str, tuple[ParamShard, Placement]]:
        """Those of `trained` whose state this rank may hold, and where that lies; of tensors with elements."""
        found = dict[str, tuple[ParamShard, Placement]]()
        for shard, name in self.trained():
            placement = self.parallel_model.state_placement(shard)
            if placement is not None and 0 not in placement.shape:
                found[name] = shard, placement
        return found

    def state_targets(
        self, saved: Mapping[str, Any], plain: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Shards, dict[str, dict[str, Any]]]:
        """Memory for the tensors of the optimizer's state in a checkpoint, which DCP describes as `saved`; and all of
        that state by parameter and key, with values that are not tensors. All ranks together."""
        self.parallel_model.find_owners()
        masters, shards = self.update.master_weights, Shards()
        own = self._stepped()
        values = {name: dict(plain.get(name, {})) for name in own}
        for full, tensor in saved.items():
            kind, key, name = [*full.split(".", 2), "", ""][:3]
            if f"{kind}." not in (STATE, COUNTERS) or name not in own:
                continue
            dtype = tensor.properties.dtype
            if f"{kind}." == COUNTERS:
                memory, placement = torch.empty(tensor.size, dtype=dtype), whole(tensor.size)
            else:
                shard, placement = own[name]
                target = masters.target(shard)
                shape = placement.shape if placement.is_whole else target.shape
                if dtype.is_floating_point and target.is_floating_point():
                    dtype = target.dtype  # as torch does
                memory = masters.optimizer.state.get(target, {}).get(key)
                if not isinstance(memory, torch.Tensor) or (memory.shape, memory.dtype) != (shape, dtype):
                    like = torch.empty_like(masters.layouts.get(target, target), dtype=dtype)
                    memory = like if shape == like.shape else like.new_empty(shape)
            shards[full] = TensorShard(memory.detach(), placement)
            values[name][key] = shards[full].tensor
        return shards, values

    def load_optimizer(self, values: Mapping[str, dict[str, Any]], saved: Sequence[dict[str, Any]]) -> None:
        """Load the state (of `state_targets`) and the settings of a checkpoint's groups, through the optimizer's
        `load_state_dict`."""
        groups, state, count = list[dict[str, Any]](), dict[int, dict[str, Any]](), itertools.count()
        for index, group in enumerate(self.groups()):
            kept = {key: group[key] for key in IMPLEMENTATION if key in group}
            numbers = {name: next(count) for name in group["params"]}
            found = saved[index_of(group["params"], index, saved)]
            groups.append({**found, **kept, "params": list(numbers.values())})
            state |= {number: rebuild_compound(values[name]) for name, number in numbers.items() if values.get(name)}
        self.update.optimizer.load_state_dict({"state": state, "param_groups": groups})


def index_of(names: Sequence[str], index: int, saved: Sequence[dict[str, Any]]) -> int:
    """The number of the group of a checkpoint that holds `names`; `index` if this rank has no parameters of it."""
    return next((number for number, group in enumerate(saved) if names and names[0] in group["params"]), index)


def without_empty(shards: Shards) -> Shards:
    """The shards of tensors with elements: DCP finds no others."""
    return {name: shard for name, shard in shards.items() if 0 not in shard.placement.shape}


# -- tensors made of other tensors, such as quantised optimizer state --------------------------------------------------
# A traceable wrapper subclass lists its inner tensors in `__tensor_flatten__`. State "exp_avg" of this kind is saved as
# the tensors "exp_avg/codes" and "exp_avg/scale", and, under "exp_avg/", the plain values needed to rebuild it.


def split_compound(key: str, tensor: Any, made: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the plain tensors in the state `key`; `made` gets the plain values for `rebuild_compound`."""
    if not is_compound(tensor):
        yield key, tensor.detach()
        return
    names, context = tensor.__tensor_flatten__()
    made[f"{key}/"] = class_name(tensor), list(names), context, tensor.shape, tensor.stride()
    for name in names:
        yield from split_compound(f"{key}/{name}", getattr(tensor, name), made)


def rebuild_compound(values: dict[str, Any]) -> dict[str, Any]:
    """`values`, state by key, with the tensors rebuilt that `split_compound` split. Their classes are looked up among
    those that the program has imported: a file imports nothing."""
    for key in [key for key in reversed(values) if key.endswith("/")]:  # the inner ones first
        kind, names, context, size, stride = values.pop(key)
        module, _, name = kind.rpartition(".")
        found = getattr(sys.modules.get(module), name, None)
        if not (isinstance(found, type) and issubclass(found, torch.Tensor)):
            raise InputError(f"the saved optimizer state holds a {kind}; import its module before the load")
        inner = {name: values.pop(key + name) for name in names}
        values[key[:-1]] = cast(Any, found).__tensor_unflatten__(inner, context, size, stride)
    return values
