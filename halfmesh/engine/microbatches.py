"""The losses of microbatches on the last stage of a pipeline, and checks that they train as the full batch does: their
losses add up to its loss, and the model computes each row independently."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import isfinite, isnan, nan
from typing import Any

import torch
from torch import nn

from ..amp.recipe import HALF
from ..errors import InputError
from ..parallel.comm import gather_objects
from ..parallel.pipeline.partition import Call
from ..parallel.pipeline.runner import Pipeline
from ..parallel.pipeline.schedules import SplitCall
from ..parallel.trial import HALF_TOLERANCE, TOLERANCE, find_gap, no_side_effects, rounds_products, unchanged
from ..utils.tensors import full_tensor, map_tensors, tensors_of
from ..utils.torch_private import BATCH_NORMS, unobserved
from .accumulation import Accumulation, LossReduction
from .pipeline_handles import Handle, PipelineOutput

_RTOL, _RTOL_HALF = 5e-4, 2e-2  # far above rounding, in fp32 and in half precision
_ATOL = 1e-6  # terms of both signs may cancel out
_OTHER_WAYS = (
    "If it sums over the samples, set loss_reduction='sum'; if it averages, 'mean'. With class weights or ignore_index "
    "it must return (sum, weight), with loss_reduction='weighted': `F.cross_entropy(output, target, weight, "
    "ignore_index=i, reduction='sum')` and `(target != i).sum()`, or with class weights `weight[target[target != "
    "i]].sum()`. One that compares the samples of a batch (a contrastive loss) cannot be split into microbatches"
)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NOT_BY_ROWS = (
    "Either the forward mixes the rows of a batch (attention or a softmax over them, experts with a capacity): "
    "train it without parallel.pipeline, or with microbatches=1 and schedule='gpipe'. Or an argument that is the same "
    "for all samples happens to have as many rows as the batch: name it in parallel.pipeline.non_split"
)


@dataclass(eq=False, repr=False)
class BatchLoss:
    """The criterion's call of each microbatch, with a handle instead of the output, and on the last stage their losses.

    Attributes:
        given: the call that was split, whose tensors may not change before backward.
        whole: on the last stage, a copy of the call for the full batch, if the losses of the microbatches are compared
            with its loss.
        full_output: the model's output for that, without memory.
        outputs: those of the microbatches, if they are kept.
        params: the first loss is rejected if it depends on these other than through the output.
    """

    accumulation: Accumulation
    function: Callable[..., Any]
    handle: PipelineOutput
    calls: Sequence[Call]
    given: SplitCall
    whole: Call | None
    full_output: Any
    keeps_outputs: bool
    outputs: list[Any] = field(default_factory=list)
    params: Collection[nn.Parameter] = ()
    _losses: dict[int, torch.Tensor] = field(default_factory=dict)
    _weights: dict[int, torch.Tensor] = field(default_factory=dict)
    _compared: list[Any] = field(default_factory=list)

    def finish(self, output: Any, index: int) -> torch.Tensor:
        """The scaled loss of microbatch `index`, from which backward runs."""
        accumulation, output = self.accumulation, self.accumulation.precision.cast_output(output)
        if self.keeps_outputs:
            self.outputs.append(map_tensors(lambda tensor: full_tensor(tensor).detach(), output))
        if self.whole is not None:  # on the host: the device may have no room for all
            copied = map_tensors(lambda tensor: full_tensor(tensor).detach().to("cpu", copy=True), output)
            self._compared.append(copied)
        total, weight = accumulation.check_loss(self._value(self.calls[index], output))
        if self.params and index == 0:
            _reject_other_ways(total, output, {id(param) for param in self.params})
        self._losses[index] = total.detach()
        if weight is not None:
            self._weights[index] = weight
        count = len(self.calls) if accumulation.reduction == "mean" else 1
        return accumulation.update.scaled(total, accumulation.seed_divisor * count)

    def figures(self, device: torch.device) -> torch.Tensor:
        """The batch's loss, its weight if weighted, and if compared the loss computed on the full batch, nan if equal:
        float64 [2] or [3]."""
        reduction = self.accumulation.reduction
        losses = torch.stack(list(self._losses.values())).to(device, torch.float64)
        weights = [weight.to(device) for weight in self._weights.values()]
        weight = torch.stack(weights).sum() if weights else torch.zeros_like(losses[0])
        figures = torch.stack([losses.mean() if reduction == "mean" else losses.sum(), weight])
        if self.whole is None:
            return figures
        losses /= len(losses) if reduction == "mean" else float(weight) or 1.0
        return torch.cat([figures, figures.new_tensor([self.other_loss(losses)])])

    def other_loss(self, terms: torch.Tensor) -> float:
        """The full batch's loss if it differs from the sum of `terms`, else nan.

        Also nan if the outputs cannot be joined, or the criterion draws random numbers or fails on them. Weighted: its
        sum / its weight.
        """
        function, device = self.function, self.accumulation.precision.device
        dims = batch_dims(self._compared, self.full_output)
        if dims is None:
            return nan
        values = iter(tensors_of(join(self._compared, dims)))

        def place(meta: torch.Tensor) -> torch.Tensor:  # by requires_grad a criterion may choose its inputs
            return next(values).to(device).requires_grad_(meta.requires_grad)

        try:
            with no_side_effects(function.modules() if isinstance(function, nn.Module) else (), device) as effects:
                value = self._value(self.whole, map_tensors(place, self.full_output))
                if effects.drew():
                    return nan
            total, weight = (value, 1.0) if isinstance(value, torch.Tensor) else value
            full = float(total) / float(weight)
        except Exception:  # the criterion may accept microbatches of this size only
            return nan
        rtol = _RTOL_HALF if total.dtype in HALF else _RTOL
        equal = abs(float(terms.sum()) - full) <= rtol * max(abs(full), float(terms.abs().sum())) + _ATOL
        return nan if equal or not isfinite(full) else full

    def _value(self, call: Any, output: Any) -> Any:
        """The criterion's value of `output`, which stands for the handle in `call`."""
        arguments = call.args, dict(call.kwargs)
        args, kwargs = map_tensors(lambda each: output if each is self.handle else each, arguments, Handle)
        return self.accumulation.precision.criterion(self.function, *args, **kwargs)


def join(outputs: Sequence[Any], dims: Iterable[int] = repeat(0)) -> Any:
    """The outputs of microbatches as that of their batch, each tensor along its dim; numbers as the items of one."""
    tensors = zip(*map(tensors_of, outputs), strict=True)
    rows = [[tensor if tensor.dim() else tensor[None] for tensor in some] for some in tensors]
    joined = iter(list(map(torch.cat, rows, dims)))
    return map_tensors(lambda _: next(joined), outputs[0])


def batch_dims(outputs: Sequence[Any], full: Any) -> list[int] | None:
    """The batch dim of each tensor of `full`, the output of a batch (no values are needed): the one in which those of
    `outputs` of its microbatches add up to it. None if a tensor has no such dim, or if anything else differs."""
    around = [repr(map_tensors(lambda _: None, tree)) for tree in (full, *outputs)]
    if around != around[:1] * len(around):
        return None
    found = [
        next((dim for dim in range(all_.dim()) if _adds_up([t.shape for t in some], all_.shape, dim)), -1)
        for all_, *some in zip(*map(tensors_of, (full, *outputs)), strict=True)
    ]
    return None if -1 in found else found


def _adds_up(shapes: Sequence[torch.Size], full: torch.Size, dim: int) -> bool:
    around = {(len(shape), shape[:dim], shape[dim + 1 :]) for shape in (full, *shapes)}
    return len(around) == 1 and sum(shape[dim] for shape in shapes) == full[dim]


def _reject_other_ways(loss: torch.Tensor, output: Any, params: Collection[int]) -> None:
    """Raise InputError if `loss` depends on parameters (by their ids) or activations other than through `output`:
    other stages' terms would be missing."""
    ends = {tensor.grad_fn for tensor in tensors_of(output)}
    todo, seen = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in ends or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in params or node.name() == "_UnpackBackward":
            raise InputError(
                "the criterion uses more of the model than its output, but this rank has only the last stage. Return "
                "such a term with the model's output; for a penalty on weights, use the optimizer's weight_decay"
            )
        todo += [following for following, _ in node.next_functions]


def reject_other_loss(made: float, full: float, count: int, reduction: LossReduction) -> None:
    """Raise InputError unless `full` is nan: the loss of the full batch, which is not that of `count` microbatches,
    `made`."""
    if isnan(full):
        return
    raise InputError(
        f"the criterion gives {full:.6g} for the whole batch, but {made:.6g} for its {count} microbatches "
        f"(loss_reduction={reduction!r}): a pipeline would train on another loss than one process. {_OTHER_WAYS}"
    )


# -- rows ------------------------------------------------------------------------------------------------------------


def reject_mixed_rows(model: nn.Module, pipeline: Pipeline, joined: Call, single: Sequence[Call], half: bool) -> None:
    """Compute some rows at once and in microbatches, and compare: a model that compares rows with each other, or takes
    a table that has a row for each sample by chance, computes another loss on microbatches than on the full batch. All
    ranks together; the model's state is restored.

    BatchNorm, which may see microbatches, and dropout run as in evaluation; so do all modules, if the model still draws
    random numbers.

    Args:
        joined: the rows of `single`, the first microbatches.
        half: something is computed in half precision.

    Raises:
        InputError: on all ranks, if the outputs differ by more than rounding.
    """
    calls = joined, *single
    for evaluated in ((*BATCH_NORMS, *_DROPOUT), (nn.Module,)):
        with unchanged(model.modules()):
            for module in model.modules():
                module.training = module.training and not isinstance(module, evaluated)
            can_run = list(map(pipeline.can_run, calls))  # each of them: ranks may ask each other
            if not all(gather_objects(all(can_run))):
                continue
            outputs, drew, _ = _run(model, pipeline, calls)
            gap = nan if drew else _gap_of(*outputs) if pipeline.has_last else 0.0
            gaps, rounds = zip(*gather_objects((gap, half or rounds_products())), strict=True)
            if any(map(isnan, gaps)):
                continue
            if max(gaps) > (HALF_TOLERANCE if any(rounds) else TOLERANCE):
                raise InputError(
                    f"{type(model).__name__} computes different outputs for the first {len(single)} microbatches "
                    f"together and one by one (by {max(gaps):.2g} of their norm): a pipeline would train on another "
                    f"loss than one process. {_NOT_BY_ROWS}"
                )
            return


def needs_whole(model: nn.Module, pipeline: Pipeline, joined: Call, single: Sequence[Call], half: bool) -> bool | None:
    """Return True if microbatches could change the outputs of the model in its present modes: those of some rows at
    once, and in microbatches, differ by more than rounding, or forward draws random numbers or writes state. None if
    nothing can be said, because all outputs are 0 or nan.

    All ranks that compute a batch together; arguments as of `reject_mixed_rows`.
    """
    outputs, drew, wrote = _run(model, pipeline, (joined, *single))
    limit = HALF_TOLERANCE if half or rounds_products() else TOLERANCE
    differs = drew or wrote or (pipeline.has_last and not _gap_of(*outputs) <= limit)
    floats = [tensor for tensor in tensors_of(outputs[0]) if tensor.is_floating_point()]
    is_empty = bool(floats) and not any(bool(tensor.nan_to_num(0.0, 0.0, 0.0).any()) for tensor in floats)
    differs, is_empty = pipeline.on_any_rank(differs, is_empty)
    return None if is_empty and not differs else differs


def _run(model: nn.Module, pipeline: Pipeline, calls: Sequence[Call]) -> tuple[list[Any], bool, bool]:
    """The output of each call, and True if one drew random numbers, or wrote state, on this rank; all is restored."""
    outputs, drew, wrote = list[Any](), False, False
    for call in calls:
        # Uncompiled: torch.compile would compile again for these sizes, and with dynamic shapes from then on.
        with (
            unobserved(),
            torch.compiler.set_stance("force_eager"),
            no_side_effects(model.modules(), pipeline.context.device) as effects,
        ):
            outputs += pipeline.evaluate([call]) or [None]
            drew, wrote = drew or effects.drew(), wrote or effects.wrote()
    return outputs, drew, wrote


def _gap_of(joined: Any, *single: Any) -> float:
    """The difference of the output of several microbatches together from their separate outputs."""
    gaps = [0.0]
    for output, *others in zip(*map(tensors_of, (joined, *single)), strict=False):
        dims = [dim for dim, size in enumerate(others[0].shape) if size != output.shape[dim]]
        if dims:
            gaps.append(find_gap(output, torch.cat(others, dims[0])))
        elif output.dim():  # without rows: the same for all, such as a table (0-dim: a loss term, which is averaged)
            gaps += [find_gap(output, other) for other in others]
    return max(gaps)
