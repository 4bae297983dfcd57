"""Keeps fp32 master weights in the user's optimizer, and full-precision originals of tensors that are not trained."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn, optim

from ..errors import InputError, shorten
from ..utils.log import get_logger
from ..utils.optimizer_state import cast, repoint
from ..utils.param_shard import ParamShard, foreign_params
from ..utils.torch_private import WriteStamp, foreach_copy_, write_stamps
from .recipe import HALF

_log = get_logger(__name__)

Masters = Mapping[nn.Parameter, nn.Parameter]

_UNCOUNTED = (
    "%s in the model and their fp32 master weights differ: one was written through `.data`. Saves have the model's "
    "values, but the next step trains the masters. Write as in `with torch.no_grad(): param.copy_(...)`"
)


class MasterWeights:
    """The parameters in the optimizer's groups, and the fp32 masters of those in half precision.

    The groups are re-pointed to the masters in place.

    Args:
        optimizer: over parameters of `shards` only.
        shards: every parameter that this rank holds, cast to the recipe's dtype.
        enabled: half-precision parameters get masters.
        masters: the masters made before the cast. The others are made from the parameters now.

    Attributes:
        masters: parameter of the model -> its master.
        trained: the shards that the optimizer steps, or has stepped: a master stays when its parameter leaves.
        stepped: shard -> the tensor that the optimizer steps for it, the parameter or its master.
        receivers: for each of `trained`, the shard in which backward leaves the gradient.
        grad_params: every parameter that may hold a gradient.
        with_master: the shards of `trained` that have a master, with it.
        originals: the full precision of tensors that are cast and not trained.
        layouts: by master, a tensor with the strides that it has in an update, if others do not count.
        stamps: when they were last published, the stamps of the tensors that users may write and that must be equal
            (masters and the parameters of the model that they replace, shards that are stepped for a parameter), by id:
            torch computes the hash of a tensor in Python.

    Raises:
        InputError: the optimizer holds parameters that are not in `shards`.
    """

    _stamps = staticmethod(write_stamps)

    def __init__(
        self, optimizer: optim.Optimizer, shards: Sequence[ParamShard], enabled: bool, masters: Masters
    ) -> None:
        self.optimizer = optimizer
        self.shards = list(shards)
        self.enabled = enabled
        self.masters = dict(masters)
        self.originals = Originals()
        self.layouts: dict[torch.Tensor, torch.Tensor] = {}
        self.stamps: dict[int, WriteStamp] = {}
        self._has_warned = False
        self.sync()

    def sync(self) -> None:
        """Follow the optimizer's groups: new half-precision parameters get masters."""
        self._reject_unknown_params()
        if self.enabled:
            half = [shard for shard in self.shards if shard.param.dtype in HALF]
            masters = masters_for(self.optimizer, half, self.masters, self.originals.take)
            repoint(self.optimizer, masters, lambda param, value: cast(value, param.dtype, torch.float32))
            self.masters.update(masters)
        held = held_ids(self.optimizer)
        self.trained = [s for s in self.shards if id(s.param) in held or s.param in self.masters]
        self.receivers = [s.source or s for s in self.trained]
        self.grad_params = [shard.param for shard in {*self.trained, *self.receivers}]
        self._targets = {shard: self.target(shard) for shard in self.trained}
        self.stepped = {shard: target for shard, target in self._targets.items() if id(target) in held}
        self.with_master = {s: self.masters[s.param] for s in self.trained if s.param in self.masters}
        self._model_params: list[torch.Tensor] = [s.model_param for s in self.with_master]
        stepped = [target for s, target in self._targets.items() if s.source is not None or s in self.with_master]
        self._watched: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in (*stepped, *self._model_params)}
        now = zip(self._watched, self._stamps(list(self._watched.values())), strict=True)
        self.stamps = {number: self.stamps.get(number, stamp) for number, stamp in now}

    def target(self, shard: ParamShard) -> nn.Parameter:
        """The tensor that the optimizer steps for `shard`: its master, if it has one."""
        return self.masters.get(shard.param, shard.param)

    def joined(self, shards: Iterable[ParamShard] | None = None, writes: bool = True) -> AbstractContextManager[None]:
        """A scope in which the masters of `shards` (None: all) have memory, which split ones have only there. With
        `writes` the model has their values in the end. Inside of it `publish` ends it."""
        return nullcontext()

    def value(self, shard: ParamShard) -> torch.Tensor:
        """The value that the optimizer steps for `shard`, to read."""
        with self.joined([shard], writes=False):
            return self.target(shard).detach()

    def held(self, target: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that keep the value of `target`, which the optimizer steps, between updates."""
        return [target.detach()]

    def reject_split(self, call: str) -> None:
        """Raise InputError if there are no masters between updates, which `call` would give."""

    @property
    def kept(self) -> list[torch.Tensor]:
        """The tensors outside the model that keep the masters."""
        return list(self.masters.values())

    def publish(self, shards: Iterable[ParamShard]) -> None:
        """Round the masters of `shards` into the model, without gradients; `mark_published` follows."""
        held = [shard for shard in shards if shard in self.with_master]
        if held:
            foreach_copy_([shard.param for shard in held], [self.with_master[shard] for shard in held])

    def mark_published(self, shards: Iterable[ParamShard]) -> None:
        """Note that the model's weights are now the rounded masters of `shards`. (An optimizer that
        steps without gradients may also have written others: `changed` finds those.)"""
        if self.stamps:
            stepped = [target for shard in shards if id(target := self._targets[shard]) in self.stamps]
            tensors = [*stepped, *self._model_params]
            self.stamps.update(zip(map(id, tensors), self._stamps(tensors), strict=True))

    def changed(self) -> set[torch.Tensor]:
        """The tensors that user code wrote since `mark_published`: masters, other tensors that are stepped in place of
        the model's, and parameters that have masters. Writes through `.data` are not seen: torch does not count them.
        """
        if not self._watched:
            return set()
        watched, then = list(self._watched.values()), list(self.stamps.values())
        now = self._stamps(watched)
        if now == then:
            return set()
        return {tensor for tensor, old, new in zip(watched, then, now, strict=True) if old != new}

    def forget_stamps(self) -> None:
        """Free what they keep: the memory of the tensors."""
        self.stamps, self._watched = {}, {}

    def adopt(self, changed: Container[torch.Tensor]) -> list[str]:
        """Copy to the masters what user code wrote into the model, which the next `publish` would undo.

        Returns the names of parameters whose master has also `changed`, to another value: either of the two may be the
        intended one.
        """
        held = [s for s in self.with_master if s.model_param in changed]
        pairs = [(shard.param, self.masters[shard.param]) for shard in held]
        unlike = []
        for shard, (_, master), value in zip(held, pairs, current_values(pairs), strict=True):
            if master not in changed:
                master.data.copy_(value)  # `.data`: not a user's write
            elif value.data_ptr() != master.data_ptr():  # a merged copy
                unlike.append(shard.name)
        return unlike

    def full_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A parameter or buffer of the model in full precision; None if the model itself holds that."""
        master = self.masters.get(tensor)  # type: ignore[call-overload]  # a buffer has none
        if master is None:
            return self.originals.value(tensor)
        has_moved = write_stamps([master]) != [self.stamps.get(id(master))]
        return master.detach() if has_moved else current_values([(tensor, master)])[0]

    def by_name(self) -> dict[str, torch.Tensor]:
        """The masters by the parameter's name, with what user code wrote into the model. Tells of `uncounted`."""
        self.tell_uncounted()
        values = current_values([(shard.param, self.masters[shard.param]) for shard in self.with_master])
        return {shard.name: value for shard, value in zip(self.with_master, values, strict=True)}

    @torch.no_grad()
    def uncounted(self) -> list[str]:
        """The names of parameters that are not their rounded masters, although torch has counted no write into either
        since the last `publish`: it was through `.data`. Reads the device."""
        changed = self.changed()
        held = [s for s in self.with_master if changed.isdisjoint((s.model_param, self.target(s)))]
        pairs = [(s.param, self.masters[s.param]) for s in held]
        flags = [
            ((param != full.to(param.dtype)) & ~param.isnan()).any().to(held[0].param.device) for param, full in pairs
        ]
        found = torch.stack(flags).cpu().tolist() if held else ()
        return [shard.name for shard, is_other in zip(held, found, strict=True) if is_other]

    def tell_uncounted(self) -> None:
        """Warn, once, of `uncounted` writes."""
        if not self._has_warned and (names := self.uncounted()):
            self._has_warned = True
            _log.warning(_UNCOUNTED, shorten(names))

    @torch.no_grad()
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy `values`, by the parameter's name, into the masters and the model. See `reject_unfit`."""
        if values:
            with self.joined():
                for shard in self.with_master:
                    self.masters[shard.param].copy_(values[shard.name])
                self.publish(self.with_master)
            self.mark_published(self.with_master)

    def set_master(self, shard: ParamShard, value: torch.Tensor) -> torch.Tensor:
        """Set the master of `shard` to `value`, which the model also loads for all of `shard.model_param`. Returns the
        value that the model must load: `value`, or `value` rounded as the masters are."""
        # A value in the parameter's dtype is not more exact than the parameter: the next step adopts the parameter.
        if value.dtype != shard.param.dtype:
            master = self.masters[shard.param].data  # `.data`: not a user's write, the model also gets it
            master.copy_(shard.part_of(torch.empty_like(shard.model_param, dtype=master.dtype).copy_(value)))
        return value

    def reject_unfit(self, values: Mapping[str, torch.Tensor]) -> None:
        """Raise InputError unless `values` are of these masters, or empty, from a mode without masters."""
        own = {(shard.name, self.masters[shard.param].shape) for shard in self.with_master}
        unfit = own ^ {(name, value.shape) for name, value in values.items()}
        if own and values and unfit:
            names = shorten(sorted({name for name, _ in unfit}))
            raise InputError(
                f"the fp32 masters in this state do not fit: {names} are missing there, unknown here, or have another "
                "shape; load a state of the same model, or only its weights"
            )

    def _reject_unknown_params(self) -> None:
        """Raise InputError if the optimizer holds parameters that this rank did not have at initialize."""
        foreign = foreign_params(self.optimizer, [*(shard.param for shard in self.shards), *self.masters.values()])
        if foreign:
            sharded = {id(p): s.name for s in self.shards if s.source for p in (s.source.param, s.original)}
            names = [sharded.get(id(param), place) for place, param in foreign.items()]
            raise InputError(
                f"{shorten(names)} joined the optimizer after initialize, when it takes only parameters of this "
                "rank's engine.model, and none under zero1 and fsdp. Add them before initialize; you can freeze them"
            )


def held_ids(optimizer: optim.Optimizer) -> set[int]:
    """The ids of the parameters in the optimizer's groups."""
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def make_master(param: torch.Tensor) -> nn.Parameter:
    """An fp32 copy of `param`. It shares the memory of an fp32 parameter, so cast the model afterwards; a view is
    copied, because it would keep all of its base alive."""
    value = param.data.float()  # `.data`: writes into both are counted separately
    if value.untyped_storage().nbytes() > value.numel() * value.element_size():
        value = value.clone()
    return nn.Parameter(value, requires_grad=True)


def masters_for(
    optimizer: optim.Optimizer, shards: Sequence[ParamShard], known: Masters, full_value: Callable[..., torch.Tensor]
) -> dict[nn.Parameter, nn.Parameter]:
    """The master of each parameter of `shards` that `optimizer` holds: one of `known`, or made from `full_value`."""
    held = held_ids(optimizer)
    params = [shard.param for shard in shards if id(shard.param) in held]
    return {param: known[param] if param in known else make_master(full_value(param)) for param in params}


class Originals:
    """The full-precision values of tensors that have no master, so that `close` restores them exactly.

    A value is kept on the host, and only where rounding changes it: nothing for weights published in bf16, nor for
    most buffers.
    """

    def __init__(self) -> None:
        self._dtypes: dict[torch.Tensor, torch.dtype] = {}
        self._values: dict[torch.Tensor, torch.Tensor] = {}
        self._targets: dict[torch.Tensor, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Register that `tensor` was cast from `value`."""
        self._dtypes[tensor] = value.dtype
        self.keep(tensor, value)

    @torch.no_grad()
    def keep(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Replace the original of `tensor` by `value`, if there is one."""
        if tensor not in self._dtypes:
            return
        value = value.detach().to(self._dtypes[tensor])
        self._values.pop(tensor, None)
        if not torch.equal(value.to(tensor.dtype).to(value.dtype), value):
            self._values[tensor] = value.to("cpu", copy=True)

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The original, with what user code wrote into `tensor` since; None: `tensor` itself is exact."""
        kept = self._values.get(tensor)
        return None if kept is None else current_values([(tensor, kept.to(tensor.device))])[0]

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remove and return the full value of `tensor`, which now gets a master."""
        value = self.value(tensor)
        self._dtypes.pop(tensor, None)
        self._values.pop(tensor, None)
        return tensor if value is None else value

    def target(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to write a new value of all of `tensor` into; call `publish` afterwards."""
        if tensor not in self._dtypes:
            return tensor.detach()
        self._targets[tensor] = torch.empty_like(tensor, dtype=self._dtypes[tensor], device="cpu")
        return self._targets[tensor].detach()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the values written into the targets into the model."""
        while self._targets:
            tensor, value = self._targets.popitem()
            tensor.copy_(value)
            self.keep(tensor, value)


@torch.no_grad()
def current_values(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """For each pair of a tensor and its full-precision value: that value, or a copy with those elements of the tensor
    that differ from its rounded ones, because user code wrote them. The host reads once for all of them."""
    if not pairs:
        return []
    device = pairs[0][0].device
    changed = torch.stack([(tensor != full.to(tensor.dtype)).any().to(device) for tensor, full in pairs]).cpu().tolist()
    return [
        torch.where(tensor != full.to(tensor.dtype), tensor.float(), full) if is_changed else full.detach()
        for (tensor, full), is_changed in zip(pairs, changed, strict=True)
    ]
