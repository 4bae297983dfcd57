"""Tensor parallelism: a model's layers are cut, each rank keeps its part, and gives it back."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

from .. import torch_private
from ..errors import InputError
from ..shard import ParamShard
from ..tree import map_tensors
from .split import Split
from .style import Undo, removal
from .tensor_axis import TensorAxis
from .tensor_checks import ResolvedPlan


class TensorParallel:
    """A model that is divided over a tensor group, in place: parameters, their names, ties and the optimizer that holds
    them stay the same objects.

    Args:
        model: equal on all ranks.
        optimizer: over its parameters; state that it has is cut along.
        plan: how each module is divided; without problems.
        axis: the tensor group.

    Attributes:
        splits: how each cut parameter was cut.
        partial: the parameters whose gradients have to be summed over the group.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, plan: ResolvedPlan, axis: TensorAxis) -> None:
        self.plan = plan
        self.axis = axis
        self.splits: dict[nn.Parameter, Split] = {}
        self.partial: set[nn.Parameter] = set()
        self._optimizer = optimizer
        self._undo: list[Undo] = []
        for a in plan.assignments:
            own = dict(a.module.named_parameters(recurse=False, remove_duplicate=False))
            self.splits |= {own[name]: split for name, split in a.style.splits(a.module).items()}
            self.partial |= set(a.style.partial(a.module, plan.in_region(a.name)))
        self.partial -= self.splits.keys()  # what is cut has the whole gradient of its part
        for param, split in self.splits.items():
            self._change(param, partial(split.cut, rank=axis.rank, size=axis.size))
        for a in plan.assignments:
            self._undo.append(a.style.install(a.module, axis, plan.in_region(a.name)))
        hooks = [*self._guard_forks(model, plan), *self._take_whole(model)]
        hooks += [
            model.register_forward_pre_hook(axis.common.enter),
            model.register_forward_hook(axis.common.leave, always_call=True),
            *_SameCalls(axis).watch(model),
        ]
        hooks.append(optimizer.register_load_state_dict_post_hook(self._refuse_other_state))
        self._undo.append(removal(hooks))

    def weight(self, param: nn.Parameter, dp_size: int) -> float:
        """1 / (number of ranks that hold the same numbers as this one)."""
        return 1 / (dp_size if param in self.splits else dp_size * self.axis.size)

    def close(self, whole: bool = True) -> None:
        """Give the layers back as they came, and each parameter whole with its optimizer state. All ranks together.

        Args:
            whole: False leaves the model as it is: other ranks may be gone.
        """
        self.axis.settle()
        if not whole:
            return
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        for param, split in self.splits.items():
            self._change(param, partial(self._whole, split))

    def _whole(self, split: Split, part: torch.Tensor) -> torch.Tensor:
        return split.join(self.axis.gathered(part))

    @torch.no_grad()
    def _change(self, param: nn.Parameter, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change a parameter and those tensors of its optimizer state that have its shape."""
        state = self._optimizer.state.get(param, {})
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim():
                state[name] = change(value)
        param.data, param.grad = change(param.data), None

    def _refuse_other_state(self, optimizer: optim.Optimizer) -> None:
        """Fused optimizers would take state of another shape as it is, and read past what is theirs."""
        for param, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != param.shape:
                    raise InputError(
                        f"the loaded optimizer state has {name!r} of shape {tuple(value.shape)} for a parameter of "
                        f"which this rank holds {tuple(param.shape)}; load what was saved by the same rank in the same "
                        "layout (engine.load_state_dict), or load the whole state into the optimizer before initialize"
                    )

    def _guard_forks(self, model: nn.Module, plan: ResolvedPlan) -> Iterator[Any]:
        """Random numbers are in common again where a module ends that divides features, also when it fails; and where
        the model begins: a backward may have left a fork open (checkpointing with preserve_rng_state=False)."""
        yield model.register_forward_pre_hook(self.axis.settle)
        modules = dict(model.named_modules())
        parents = {_caller(modules, a.name) for a in plan.assignments if a.style.opens_fork}
        for parent in sorted(parents | {""}):
            yield modules[parent].register_forward_hook(self.axis.settle, always_call=True)

    def _take_whole(self, model: nn.Module) -> Iterator[Any]:
        """State dicts with whole tensors can be loaded, too: each rank takes its part."""
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            cut = {name: self.splits[param] for name, param in own.items() if param in self.splits}
            if cut:
                yield module.register_load_state_dict_pre_hook(TakePart(self.axis, cut))


class TakePart:
    """Makes whole tensors in a state dict this rank's part, before they are loaded into a divided module."""

    def __init__(self, axis: TensorAxis, splits: Mapping[str, Split]) -> None:
        self._axis = axis
        self._splits = dict(splits)

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, split in self._splits.items():
            value = state.get(prefix + name)
            if value is not None and torch_private.assigns(metadata):
                raise InputError(
                    f"load_state_dict(..., assign=True) would replace {prefix + name}, of which this rank holds a "
                    "part; load without assign, or load before initialize"
                )
            if isinstance(value, torch.Tensor) and value.shape == split.whole_shape(own[name].shape, self._axis.size):
                state[prefix + name] = split.cut(value, self._axis.rank, self._axis.size)


class _SameCalls:
    """Compares what goes into the model, and what comes out, over the ranks of a tensor group: in the first call of
    each mode. Ranks that see different data would mix it up silently, and an output that is divided is not the model's.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis
        self._seen: set[bool] = set()
        self._looking = False

    def watch(self, model: nn.Module) -> Iterator[Any]:
        yield model.register_forward_pre_hook(self._compare_inputs, with_kwargs=True)
        yield model.register_forward_hook(self._compare_outputs)

    @torch.no_grad()
    def _compare_inputs(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._looking = model.training not in self._seen
        self._seen.add(model.training)
        if self._looking and len(set(self._everyone(_digest((args, kwargs))))) > 1:
            raise InputError(
                f"the {self._axis.size} ranks of a tensor group were given different inputs, but they compute one "
                "batch together; iterate engine.dataloader, or shard a loader of your own by engine.context.dp_rank of "
                "engine.context.dp_size"
            )

    @torch.no_grad()
    def _compare_outputs(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._looking:
            return
        self._looking = False
        found: list[torch.Tensor] = []
        map_tensors(lambda tensor: found.append(tensor) or tensor, output)  # type: ignore[func-returns-value]
        mine = [(tuple(tensor.shape), _norm(tensor)) for tensor in found]
        everyone = self._everyone(mine)
        if any(not _alike(mine, theirs) for theirs in everyone):
            raise InputError(
                "the model's output differs between the ranks of a tensor group: part of it is divided. Give the last "
                "layer the style 'colwise_gather' if it has 'colwise'; do not return what is between divided layers "
                "(hidden states under sequence_parallel, attention weights)"
            )

    def _everyone(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self._axis.size
        dist.all_gather_object(everyone, mine, group=self._axis.group)
        return everyone


def _digest(tree: Any) -> str:
    digest = hashlib.sha256()

    def take(tensor: torch.Tensor) -> torch.Tensor:
        digest.update(_content(tensor))
        return tensor

    map_tensors(take, tree)
    return digest.hexdigest()


def _norm(tensor: torch.Tensor) -> tuple[float, ...]:
    """Norms of a tensor and of its halves, by which two are told apart."""
    if tensor.layout != torch.strided or not tensor.is_floating_point():
        return ()
    flat = tensor.detach().reshape(-1).float()
    return tuple(float(torch.linalg.vector_norm(part)) for part in (flat, *flat.chunk(7)))


def _alike(mine: list[Any], theirs: list[Any]) -> bool:
    """Whether shapes are equal, and norms but for rounding (in bf16, and of what an overflow has left)."""
    if [shape for shape, _ in mine] != [shape for shape, _ in theirs]:
        return False
    pairs = [pair for (_, a), (_, b) in zip(mine, theirs, strict=True) for pair in zip(a, b, strict=True)]
    return all(math.isclose(a, b, rel_tol=2e-2, abs_tol=1e-6) for a, b in pairs if math.isfinite(a + b))


def make_shards(model: nn.Module, tensor: TensorParallel | None, copies: int) -> list[ParamShard]:
    """The parameters of `model` on this rank, of which each whole one has `copies` on as many ranks."""
    size = 1 if tensor is None else tensor.axis.size
    return [
        ParamShard(name, p, weight=1 / copies if tensor is None else tensor.weight(p, copies // size))
        for name, p in model.named_parameters()
    ]


def _caller(modules: Mapping[str, nn.Module], name: str) -> str:
    """The nearest module above `name` that is called itself (a ModuleList is not)."""
    while name:
        name = name.rpartition(".")[0]
        if type(modules[name]).forward is not nn.Module.forward:
            break
    return name


def _content(tensor: torch.Tensor) -> bytes:
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"{tensor.layout} {tensor.dtype}".encode()
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return f"{tuple(tensor.shape)} {tensor.dtype}".encode() + flat.view(torch.uint8).numpy().tobytes()
