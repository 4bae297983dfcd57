"""Measures what each layer's numbers are like, in replays of the last batch, and makes the report of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..amp.step_result import StepResult
from ..shard import ParamShard, compute_dtype
from .findings import find
from .last_batch import LastBatch
from .layer_sizes import odd_sizes
from .parts import Parts
from .precision_report import LayerPrecision, PrecisionReport, name_of
from .probes import Listener, Visit
from .replay import replay
from .tensor_numbers import Numbers, largest_number, look_at

_SAFE = 4096.0
"""The second replay's gradients reach this far, a sixteenth of float16's largest number: others than those that are
seen, within layers, are larger."""
_MOST = 2.0**24
"""More is not needed: from float16's smallest number it is as far as 1."""


@dataclass
class Layer:
    """What was seen of one module that has parameters of its own, on one rank; or, added up, on several."""

    kind: str
    param_dtype: torch.dtype
    masters: bool
    sizes: tuple[str, ...]
    output_dtype: torch.dtype | None = None
    outputs: Numbers = field(default_factory=Numbers)
    gradient_dtype: torch.dtype | None = None
    gradients: Numbers = field(default_factory=Numbers)
    """Of outputs."""
    weights: Numbers = field(default_factory=Numbers)
    """Of the parameters' complete gradients."""
    wanted: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()
    """Parameters that are trained, and those that got a gradient."""

    def add(self, other: Layer) -> None:
        """What another rank has seen."""
        self.output_dtype = self.output_dtype or other.output_dtype
        self.gradient_dtype = self.gradient_dtype or other.gradient_dtype
        self.outputs += other.outputs
        self.gradients += other.gradients
        self.weights += other.weights
        self.wanted |= other.wanted
        self.given |= other.given
        self.masters |= other.masters


class Survey(Listener):
    """Adds up what is seen of each layer.

    Attributes:
        layers: by name, in the model's order.
    """

    def __init__(self, parts: Parts) -> None:
        shards = [shard for shard in parts.update.master_weights.trained if shard.param.requires_grad]
        trained = {shard.name: _has_master(shard, parts) for shard in shards}
        half = parts.update.recipe.compute_dtype in (torch.float16, torch.bfloat16)
        self.layers: dict[str, Layer] = {}
        for name, module in parts.model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if not own:
                continue
            names = frozenset(f"{name}.{p}" if name else p for p in own)
            masters = any(trained.get(p, False) for p in names)
            dtype = compute_dtype(next(iter(own.values())))
            sizes = odd_sizes(module) if half else ()
            self.layers[name] = Layer(type(module).__name__, dtype, masters, sizes, wanted=names & trained.keys())

    def left(self, visit: Visit, outputs: Sequence[torch.Tensor]) -> None:
        layer = self.layers.get(visit.name) if isinstance(visit.module, nn.Module) else None
        for tensor in outputs if layer is not None else ():
            if layer is not None and tensor.is_floating_point():
                layer.output_dtype = layer.output_dtype or tensor.dtype
                layer.outputs += look_at(tensor)

    def gradient(self, visit: Visit, of_input: bool, grad: torch.Tensor, order: int) -> None:
        layer = None if of_input else self.layers.get(visit.name)
        if layer is not None:
            layer.gradient_dtype = layer.gradient_dtype or grad.dtype
            layer.gradients += look_at(grad)

    def complete_gradient(self, name: str, grad: torch.Tensor) -> None:
        layer = self.layers.get(name.rpartition(".")[0])
        if layer is not None:
            layer.weights += look_at(grad)
            layer.given |= {name}


def make_report(parts: Parts, batch: LastBatch, results: Sequence[StepResult]) -> PrecisionReport:
    """The report over all ranks, which call this together."""
    first, second = Survey(parts), Survey(parts)
    notes = replay(parts, batch, first)
    factor, why = _factor(parts, first)
    if factor > 1:
        replay(parts, batch, second, factor)
    everyone = parts.context.everyone((first.layers, second.layers))
    plain, larger = (_joined([both[i] for both in everyone]) for i in (0, 1))
    if factor > 1 and any(layer.gradients.bad for layer in larger.values()):
        factor, why = 1.0, f"gradients overflow within layers when they are {factor:g} times larger"
    recipe, scales = parts.update.recipe, parts.update.loss_scales.current()
    scale = scales[batch.loss_id] if parts.update.loss_scales.scalers else None
    if not any(layer.given for layer in plain.values()):  # no backward was computed
        for layer in plain.values():
            layer.wanted = frozenset()
    layers = tuple(
        _row(name, layer, larger[name] if factor > 1 else None, scale or 1.0) for name, layer in plain.items()
    )
    report = PrecisionReport(
        compute_dtype=name_of(recipe.compute_dtype),
        loss_scale=scale,
        is_dynamic=recipe.loss_scale is not None and recipe.loss_scale.dynamic,
        skipped=sum(result.skipped for result in results),
        updates=len(results),
        factor=factor if factor > 1 else None,
        not_measured=why,
        room=_room(plain, parts.update.loss_scales.multi is not None)
        if recipe.compute_dtype == torch.float16
        else None,
        layers=layers,
        notes=tuple(notes),
        findings=(),
    )
    return report.with_findings(find(report, recipe))


def _factor(parts: Parts, survey: Survey) -> tuple[float, str | None]:
    """How many times larger the second replay's gradients are, and why there is none. The same on all ranks."""
    if parts.update.recipe.compute_dtype != torch.float16:
        return 1.0, f"nothing, as {name_of(parts.update.recipe.compute_dtype)} has the exponents of fp32"
    seen = [layer.gradients for layer in survey.layers.values()]
    largest = max((numbers.largest for numbers in seen), default=0.0)
    everyone = parts.context.everyone((largest, any(numbers.bad for numbers in seen)))
    largest, overflows = max(value for value, _ in everyone), any(bad for _, bad in everyone)
    if overflows:
        return 1.0, "not measured: gradients are inf or nan at this loss scale"
    if largest == 0:
        return 1.0, "not measured: there were no gradients of layers' outputs"
    factor = min(2.0 ** math.floor(math.log2(_SAFE / largest)), _MOST)
    if factor <= 1:
        return 1.0, f"not measured: gradients reach {largest:.3g} at this loss scale, and have no room above"
    return factor, None


def _room(layers: Mapping[str, Layer], unscaled: bool) -> float | None:
    """How many times larger the loss scale could be, a power of two, before a gradient leaves float16.

    Args:
        unscaled: complete gradients do not carry the scale any more.
    """
    both = [layer.gradients for layer in layers.values()] + [layer.weights for layer in layers.values() if not unscaled]
    largest = max((numbers.largest for numbers in both), default=0.0)
    if not largest or any(numbers.bad for numbers in both):
        return None
    return 2.0 ** math.floor(math.log2(largest_number(torch.float16) / largest))


def _joined(surveys: Sequence[Mapping[str, Layer]]) -> dict[str, Layer]:
    """What all ranks have seen, layer by layer. (Stages of a pipeline follow each other as ranks do.)"""
    joined: dict[str, Layer] = {}
    for survey in surveys:
        for name, layer in survey.items():
            if name in joined:
                joined[name].add(layer)
            else:
                joined[name] = layer
    return joined


def _row(name: str, layer: Layer, larger: Layer | None, scale: float) -> LayerPrecision:
    gradients, weights = layer.gradients, layer.weights
    in_half = layer.gradient_dtype == torch.float16
    return LayerPrecision(
        name=name,
        kind=layer.kind,
        param_dtype=name_of(layer.param_dtype),
        masters=layer.masters,
        output_dtype=name_of(layer.output_dtype),
        largest_output=layer.outputs.largest if layer.output_dtype else None,
        output_share=_share(layer.outputs, layer.output_dtype),
        gradient_dtype=name_of(layer.gradient_dtype),
        largest_gradient=gradients.largest / scale if layer.gradient_dtype else None,
        gradient_share=_share(gradients, layer.gradient_dtype),
        lost_gradients=_lost(gradients, larger.gradients) if larger is not None and in_half else None,
        subnormal_gradients=gradients.subnormal / gradients.count if in_half and gradients.count else None,
        lost_weight_gradients=_lost(weights, larger.weights) if larger is not None and weights.count else None,
        nonfinite=layer.outputs.bad + gradients.bad + weights.bad,
        without_gradient=tuple(sorted(layer.wanted - layer.given)),
        odd_sizes=layer.sizes,
    )


def _share(numbers: Numbers, dtype: torch.dtype | None) -> float | None:
    return None if dtype is None else numbers.largest / largest_number(dtype)


def _lost(numbers: Numbers, larger: Numbers) -> float:
    """The share of elements that are zero, and are not when all are larger."""
    return max(0, numbers.zeros - larger.zeros) / max(1, numbers.count)


def _has_master(shard: ParamShard, parts: Parts) -> bool:
    model_side = shard.param if shard.source is None else shard.source.param
    return shard.param in parts.update.master_weights.masters or compute_dtype(model_side) != shard.param.dtype
