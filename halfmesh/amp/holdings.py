"""What the user's optimizer holds: which parameters, or masters in their place, and with which implementation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import is_, methodcaller, not_
from typing import Any

import torch
from torch import nn, optim
from torch.utils.hooks import RemovableHandle

from .. import torch_private
from ..errors import InputError, shorten
from ..own_steps import is_of_torch, step_of
from ..shard import ParamShard, foreign_params
from . import fused
from .collected import Gradients, Layout, forms
from .master_weights import current_value, masters_for, publish, repoint
from .originals import Originals
from .recipe import HALF, Recipe
from .rules import UpdateRules

# Update one parameter from that parameter's gradient and state alone, so that a step may be taken in parts.
_ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adagrad,
    optim.RMSprop,
    optim.Adadelta,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.ASGD,
    optim.Rprop,
)

_values = methodcaller("values")


class Holdings:
    """The parameters of the optimizer's groups, each with its shard; kept true as groups change.

    Args:
        optimizer: its groups are re-pointed to masters in place.
        shards: every parameter that this rank holds, cast to the recipe's dtype.
        masters: fp32 masters made before the cast; others are made from the parameters as they are.

    Attributes:
        masters: the fp32 master of each of the model's parameters that has one.
        trained: the shards whose parameters the optimizer holds, or has held: those with masters.
        stepped: of these, those that it holds.
        receivers: those in which backward leaves their gradients: themselves, or what they are parts of.
        with_grads: the parameters of all these, each of which may have a gradient.
        targets: what it holds for each of them, by the shard's id.
        folds: whether `optimizer.step` takes the loss scale and the verdict along.
        sparse: whether a gradient was sparse.
        originals: the full precision of tensors that are cast and not trained.
        guard: halfmesh's own hook around the optimizer's step.
        seeded: momentum that was made for updates to come, by the optimizer's parameter.
        refreshed: how often `refresh` ran; what others derived from this object before that is out of date.

    Raises:
        InputError: the optimizer holds parameters that are not in `shards`.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        shards: Sequence[ParamShard],
        recipe: Recipe,
        rules: UpdateRules,
        masters: Mapping[nn.Parameter, nn.Parameter] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.shards = list(shards)
        self.masters = dict(masters or {})
        self.originals = Originals()
        self._recipe = recipe
        self._rules = rules
        self.sparse = False
        self._switched: set[int] = set()
        self.seeded: dict[torch.Tensor, torch.Tensor] = {}
        self._published: list[nn.Parameter] = []  # with a master
        self._watched: list[nn.Parameter] = []  # of each of them, what the model uses
        self._model_params = {shard.param: shard.model_param for shard in shards}
        self._stamps: list[tuple[int, int]] = []  # of each of them, when its master was last rounded into it
        self.guard: RemovableHandle | None = None
        self.refreshed = 0
        self._load_hook = optimizer.register_load_state_dict_post_hook(lambda _: self.refresh())
        self.refresh()

    def refresh(self) -> None:
        """Take in what changed in the optimizer's groups: parameters added later, implementation flags."""
        self._refuse_late_params()
        if self._recipe.master_weights:
            half = [s for s in self.shards if s.param.dtype in HALF]
            new = masters_for(self.optimizer, half, self.masters, self.originals.take)
            repoint(self.optimizer, new)
            self.take_over(new)
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self.trained = [s for s in self.shards if id(s.param) in held or s.param in self.masters]
        self.receivers = [s.source or s for s in self.trained]
        self.with_grads = list({id(s): s.param for s in (*self.trained, *self.receivers)}.values())
        self.targets = {id(s): self.masters.get(s.param, s.param) for s in self.trained}
        self.stepped = [s for s in self.trained if id(self.targets[id(s)]) in held]
        self._forms = forms([self.targets[id(s)] for s in self.stepped])
        self._layout: Layout | None = None
        fused.refuse_broken(self.optimizer)
        fused.switch_back(self.optimizer, self._switched)  # it may not be exact any more
        self._switched = set()
        if self._rules.fused == "auto" and not self.sparse:
            self._switched = fused.switch_to_fused(self.optimizer)
        fused.place_step_counters(self.optimizer)
        self.folds = fused.takes_scale(self.optimizer)
        if self.folds:
            self.seeded |= fused.seed_momentum(self.optimizer)
        else:
            fused.take_back_momentum(self.optimizer, self.seeded)
        self.refreshed += 1
        self._known = [list(group["params"]) for group in self.optimizer.param_groups]  # alive, so that ids stay theirs
        self._ids = [list(map(id, params)) for params in self._known]
        self._seen = self._signature()
        self._step = step_of(self.optimizer)
        self._held = list(self._objects())
        self._held_ids = list(map(id, self._held))

    def _refuse_late_params(self) -> None:
        """Raise InputError if the optimizer holds parameters that were none of this rank's at initialize."""
        known = [*(shard.param for shard in self.shards), *self.masters.values()]
        foreign = foreign_params(self.optimizer, known)
        if not foreign:
            return
        divided = {id(p): s.name for s in self.shards if s.source for p in (s.source.param, s.original)}
        names = [divided[id(param)] for param in foreign.values() if id(param) in divided]
        if names:
            raise InputError(
                f"{shorten(names)} came into the optimizer after initialize, which had sharded the model's parameters "
                "over the data ranks by then, and put shards into the optimizer; put them in before (frozen ones may "
                "be unfrozen later), or use data='replicate'"
            )
        raise InputError(
            f"{len(foreign)} parameter(s) came into the optimizer after initialize that this rank's part of the model "
            f"did not have then: {shorten(list(foreign))}. Add a new layer before initialize (it may be frozen, and "
            "unfrozen later), or close the engine, add it, and initialize again. What the model had is to be taken "
            "from engine.model, not from a list made before: under a pipeline each rank has its stages only"
        )

    def take_over(self, masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """These are the masters of parameters from now on."""
        self.masters.update(masters)
        known = {id(param) for param in self._published}
        added = [param for param in masters if id(param) not in known]
        self._published += added
        watched = [self._model_params[param] for param in added]
        self._watched += watched
        self._stamps += torch_private.edit_stamps(watched)

    def changed(self) -> bool:
        """Whether parameters were added or laid out anew since the last `refresh`, or what decides the implementation
        is another: settings, the `step`, or for fused ones the groups and the state."""
        if self._signature() != self._seen or step_of(self.optimizer) is not self._step:
            return True
        return self.folds and list(map(id, self._objects())) != self._held_ids

    @property
    def regrouped(self) -> bool:
        """Whether the groups hold other parameters than at the last `refresh`."""
        return [list(map(id, group["params"])) for group in self.optimizer.param_groups] != self._ids

    def trainable(self) -> list[tuple[int, bool]]:
        """The id of each of `trained`, and whether its parameter requires gradients now."""
        return [(id(shard), (shard.source or shard).param.requires_grad) for shard in self.trained]

    def target(self, shard: ParamShard) -> nn.Parameter:
        """What the optimizer holds for `shard`, one of those trained."""
        return self.targets[id(shard)]

    @property
    def was_switched(self) -> bool:
        """Whether the optimizer is fused because its user left that open."""
        return bool(self._switched)

    @property
    def keeps_masters(self) -> bool:
        """Whether half-precision parameters get masters, now or when they are added."""
        return self._recipe.master_weights

    @property
    def streams(self) -> bool:
        """Whether a step may be taken in parts: an elementwise optimizer of torch, without hooks of the user's."""
        optimizer = self.optimizer
        hooked = torch_private.has_step_hooks(optimizer, self.guard)
        return type(optimizer) in _ELEMENTWISE and not hooked and is_of_torch(step_of(optimizer))

    def publish(self, shards: Sequence[ParamShard]) -> None:
        """Round the masters of `shards` into the model; `note_published` follows."""
        pairs = [(s.param, target) for s in shards if (target := self.targets[id(s)]) is not s.param]
        if pairs:
            publish(pairs)

    def note_published(self) -> None:
        """The model is as the masters say."""
        if self._published:
            self._stamps = torch_private.edit_stamps(self._watched)

    def take_edits(self) -> None:
        """Take over what was written into the model by others since the last `publish`: the next one would undo it.

        (Not seen: writes through `param.data`, as in `param.data.clamp_()`; torch keeps no count of those.)
        """
        now = torch_private.edit_stamps(self._watched)
        if now == self._stamps:
            return
        for param, old, new in zip(self._published, self._stamps, now, strict=True):
            if old != new:
                self.masters[param].data.copy_(current_value(param, self.masters[param]))
        self._stamps = now

    def full_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The full precision of a parameter or buffer that the model has in half precision: of its master, or of what
        it came with. None: there is none, or it is no other."""
        master = self.masters.get(tensor)  # type: ignore[call-overload]  # a buffer has none
        return self.originals.value(tensor) if master is None else current_value(tensor, master)

    def masters_by_name(self) -> dict[str, torch.Tensor]:
        """The fp32 value of each parameter that has a master, by the parameter's name.

        It is the master itself, or a copy with what others have written into the model since.
        """
        return {s.name: current_value(s.param, self.masters[s.param]) for s in self.trained if s.param in self.masters}

    def collect(self) -> Gradients:
        """What an update would use now: the gradients that are there on this rank."""
        shards = self.stepped
        grads: list[Any] = [shard.param.grad for shard in shards]
        if any(map(is_, grads, repeat(None))):
            shards = [shard for shard, grad in zip(shards, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        own = forms(grads)
        layout = self._layout
        if layout is None or shards != layout.shards or own != layout.forms:
            fits = not self.masters and own == self._forms and len(shards) == len(self.stepped)
            layout = self._layout = Layout(shards, own, fits)
        return Gradients(layout, grads)

    def note_used(self, shards: Iterable[ParamShard]) -> None:
        """An update begins with gradients of these: momentum that was made for it is used."""
        for shard in shards:
            self.seeded.pop(self.targets[id(shard)], None)

    def unfuse_for_sparse(self) -> None:
        """Go back to torch's own choice of implementation when gradients are sparse: fused ones cannot take them."""
        if not self.sparse:
            self.sparse = True
            self.refresh()

    @torch.no_grad()
    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take new values for the masters, and round them into the model; names that are missing stay."""
        taken = []
        for shard in self.trained:
            value, master = weights.get(shard.name), self.masters.get(shard.param)
            if master is not None and value is not None and value.shape == master.shape:
                master.copy_(value)
                taken.append(shard)
        self.publish(taken)
        self.note_published()

    def close(self) -> None:
        """Remove the hook from the optimizer, and leave its implementation to torch again."""
        fused.switch_back(self.optimizer, self._switched)
        fused.place_step_counters(self.optimizer)
        self._load_hook.remove()

    def _objects(self) -> Iterable[Any]:
        """The groups, the parameters that have a state, and the values in it."""
        state = self.optimizer.state
        return chain(self.optimizer.param_groups, state, chain.from_iterable(map(_values, state.values())))

    def _signature(self) -> list[tuple[list[int], list[tuple[int, ...]], list[bool]]]:
        """Of each group its parameters, and what decides the implementation. With `map`, because this is done at each
        step."""
        return [
            (
                list(map(id, params := group["params"])),
                list(map(torch.Tensor.stride, params)),
                list(map(not_, map(group.get, fused.DECISIVE))),
            )
            for group in self.optimizer.param_groups
        ]
