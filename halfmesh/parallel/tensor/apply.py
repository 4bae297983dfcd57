"""Applies tensor parallelism to a model: shards its layers, and sums gradients over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import InputError, shorten
from ...utils.param_shard import ParamShard
from ...utils.torch_private import all_gather
from ..axis import Axis, AxisInputs, PlanInputs
from ..reducer import SharedGradients
from .layers import TensorAxis
from .plans import Assignment, caller, generalise, resolve, splits_of
from .styles import SequenceBegin
from .trial import PlanTrial

_LOOKS = 5  # as long as some gradients are zero
_SAMPLE = 256  # elements of each gradient


class TensorGradients(SharedGradients):
    """Sums the gradients of parameters that work on this rank's shard of the activations (norms under sequence
    parallelism).

    In the first updates it compares gradients of replicated parameters over the ranks: the plan is wrong if those that
    are summed are equal (except for shards of the sequence, where a mean gives equal ones), or others differ. Gradients
    of zero (before a layer that starts at zero) are also compared in the next updates.

    Args:
        shards: the shards of the parameters that are trained.
    """

    def __init__(self, axis: TensorParallel, shards: Sequence[ParamShard]) -> None:
        self._axis = axis
        super().__init__(axis.partial, axis.group, shards)

    def set_params(self, shards: Sequence[ParamShard]) -> None:
        super().set_params(shards)
        self._looks, self._adds = _LOOKS, False
        self._replicated = [shard for shard in shards if shard.model_param not in self._axis.splits]

    def open(self, last: bool) -> None:
        self._adds = self.state == "reduced"  # to sums of this update, which are equal on all ranks
        super().open(last)

    def finish(self) -> None:
        self._axis.trial.run()  # before the comparison, which a wrong plan also fails
        self._compare_replicated()
        super().finish()

    @torch.no_grad()
    def _compare_replicated(self) -> None:
        """Raise InputError if gradients that must be summed are equal on all ranks, or if others differ."""
        shards = (
            [shard for shard in self._replicated if shard.param.requires_grad] if self._looks and not self._adds else []
        )
        if not shards:
            return
        samples = torch.stack([_sample(shard.param.grad, self._axis.device) for shard in shards])
        everyone = samples.new_empty((self._axis.size, *samples.shape))
        all_gather(everyone.flatten(0, 1), samples, group=self._axis.group)
        if not bool(everyone.isfinite().all()):
            return  # an overflow cannot be compared; the next update can
        sizes = everyone.norm(dim=-1).amax(0)
        self._looks = 0 if bool(sizes.all()) else self._looks - 1
        differences = ((everyone - everyone[0]).norm(dim=-1).amax(0) / sizes).tolist()  # nan where all are zero
        found = [(s.name, gap, s.model_param in self._params) for s, gap in zip(shards, differences, strict=True)]
        same = [name for name, gap, is_summed in found if is_summed and gap < 1e-4]
        if same and not self._axis.shards_sequence:
            raise InputError(f"the plan sums the gradients of {shorten(same)}, but they are the same on all ranks")
        if names := [name for name, gap, is_summed in found if not is_summed and gap > 1e-2]:
            raise InputError(
                f"the gradients of {shorten(names)} differ between the ranks of a tensor group: give their modules, "
                "which see sharded activations, the style 'partial', or leave the layers around them whole"
            )


def _sample(grad: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """`_SAMPLE` elements spread over the gradient. (Sums of large tensors differ too little.)"""
    sample = torch.zeros(_SAMPLE, dtype=torch.float64, device=device)
    if grad is not None:
        values = (grad.coalesce().values() if grad.is_sparse else grad).reshape(-1)
        some = values[:: max(1, values.numel() // _SAMPLE)][:_SAMPLE]
        sample[: some.numel()] = some
    return sample


class TensorParallel(TensorAxis):
    """A model that was sharded over the tensor axis, in place: its parameters, their names, ties and optimizer stay the
    same objects.

    Attributes:
        partial: the parameters whose gradients are summed over the ranks.
        shards_sequence: ranks compute different tokens between some modules.
        trial: compares sharded blocks with unsharded ones before the first update.
    """

    def __init__(self, inputs: AxisInputs) -> None:
        super().__init__(inputs.context)
        model, optimizer = inputs.model, inputs.optimizer
        self._assignments: list[Assignment] = inputs.plan
        self.shards_sequence = any(isinstance(a.style, SequenceBegin) for a in self._assignments)
        self.trial = PlanTrial(model, self._assignments, self)
        splits = splits_of(self._assignments)
        self.partial = {param for a in self._assignments for param in a.style.partial(a.module, a.in_region)}
        self.partial -= splits.keys()  # each rank has the full gradient of its shard
        for param, split in splits.items():
            self.split(optimizer, param, split)
        for assignment in self._assignments:
            assignment.install(self)
        # Ranks draw the same random numbers again after each module whose children shard features, also if its forward
        # fails; and after the model, as a backward may have left a fork open (checkpointing, preserve_rng_state=False).
        modules = dict(model.named_modules())
        for parent in {"", *(caller(modules, a.name) for a in self._assignments if a.style.opens_fork)}:
            modules[parent].register_forward_hook(self.end_tp_region, always_call=True)
        self.take_whole_states(model, optimizer)
        self.trial.watch()

    def make_reduction(self, shards: Sequence[ParamShard]) -> TensorGradients:
        return TensorGradients(self, shards)

    def skip_trial(self) -> None:
        self.trial.close()

    def settle(self) -> None:
        self.end_tp_region()

    def explain(self, error: RuntimeError) -> None:
        self.trial.explain(error)

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> dict[str, str]:
        """The layers that are sharded over the tensor axis, and their fraction of the parameters."""
        sharded = {name for name, param in params.items() if param in self.splits}
        own = self.size * sum(sizes[name] for name in sharded)
        share = own / (own + sum(size for name, size in sizes.items() if name not in sharded))
        counts = Counter(generalise(name) for name in sorted({name.rpartition(".")[0] for name in sharded}))
        layers = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in counts.items())
        sequence = " and the sequence" if any(a.style.is_region for a in self._assignments) else ""
        return {"layout": f"{share:.0%} of parameters{sequence} sharded over tp: {layers}"}


class TensorParallelism(Axis):
    """`parallel.tensor`."""

    dim = "tp"
    cost = "sharded layers wait for the group's sums in forward and in backward"

    @staticmethod
    def find_key_problems(config: Any) -> Iterator[tuple[str, str]]:
        if config.compile.enabled and config.compile.fullgraph:
            yield "compile.fullgraph", "sharded layers wait for other ranks, which breaks the graph; remove fullgraph"

    @staticmethod
    def plan(inputs: PlanInputs) -> tuple[list[Assignment], list[str]]:
        options = inputs.options
        return resolve(inputs.model, options.size, options.plan, options.sequence_parallel)

    apply = TensorParallel
