"""`engine.precision_report()`: measures the numbers of each layer in one real update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..errors import InputError
from ..loop.parts import EngineParts
from ..shard import ParamShard, compute_dtype
from .precision_report import LayerPrecision, PrecisionReport, find_problems
from .probes import Probes, Visit
from .tensor_stats import TensorStats, largest_number, measure, name_of


@dataclass
class _Layer:
    """What one rank, or several together, measured of a module that has parameters of its own."""

    kind: str
    param_dtype: torch.dtype
    masters: bool
    outputs: TensorStats = field(default_factory=TensorStats)
    gradients: TensorStats = field(default_factory=TensorStats)
    """Of outputs."""
    weights: TensorStats = field(default_factory=TensorStats)
    """Of the parameters' complete gradients."""

    def add(self, other: _Layer) -> None:
        """Add what another rank measured."""
        self.masters |= other.masters
        self.outputs += other.outputs
        self.gradients += other.gradients
        self.weights += other.weights

    def row(self, name: str, scale: float) -> LayerPrecision:
        """The same for the report."""
        outputs, gradients, weights = self.outputs, self.gradients, self.weights
        return LayerPrecision(
            name=name,
            kind=self.kind,
            param_dtype=name_of(self.param_dtype),
            masters=self.masters,
            output_dtype=name_of(outputs.dtype),
            largest_output=outputs.largest if outputs.dtype else None,
            output_share=outputs.largest / largest_number(outputs.dtype) if outputs.dtype else None,
            gradient_dtype=name_of(gradients.dtype),
            largest_gradient=gradients.largest / scale if gradients.dtype else None,
            gradient_share=gradients.largest / largest_number(gradients.dtype) if gradients.dtype else None,
            zero_gradients=_share(gradients.zeros, gradients),
            subnormal_gradients=_share(gradients.subnormal, gradients),
            subnormal_weight_gradients=_share(weights.subnormal, weights),
            nonfinite=outputs.nonfinite + gradients.nonfinite + weights.nonfinite,
        )


def _share(count: int, stats: TensorStats) -> float | None:
    return count / stats.count if stats.dtype == torch.float16 and stats.count else None


class PrecisionSurvey(Probes):
    """Measures each layer until `finish`, which fills `report`."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        update = parts.update
        self.report = PrecisionReport(name_of(update.recipe.compute_dtype))
        trained = {shard.name: shard for shard in update.master_weights.trained if shard.param.requires_grad}
        self._layers: dict[str, _Layer] = {}
        for name, module in parts.model.named_modules():
            own = dict(module.named_parameters(name, recurse=False))
            if own:
                masters = any(_has_master(trained[p], parts) for p in own if p in trained)
                self._layers[name] = _Layer(type(module).__name__, compute_dtype(next(iter(own.values()))), masters)
        self._scale: float | None = None  # no step was taken yet

    def left(self, visit: Visit, outputs: Sequence[torch.Tensor]) -> None:
        layer = self._layers.get(visit.name)
        if layer is not None:
            layer.outputs = sum((measure(out) for out in outputs if out.is_floating_point()), layer.outputs)

    def gradient(self, visit: Visit, grad: torch.Tensor, order: int) -> None:
        layer = self._layers.get(visit.name)
        if layer is not None:
            layer.gradients += measure(grad)

    def before_step(self) -> None:
        """Measure the gradients that this rank's optimizer steps with."""
        update = self._parts.update
        self._scale = update.loss_scales.current()[0]
        for layer in self._layers.values():
            layer.weights = TensorStats()  # inside a cycle those of the next microbatch are sums with these
        for shard, grad in update.gradients().items():
            owner = shard.name.rpartition(".")[0]
            if owner in self._layers:
                self._layers[owner].weights += measure(grad)

    def finish(self) -> None:
        """Fill the report, the same over all ranks, which call this together.

        Raises:
            InputError: no step was taken since the survey began.
        """
        if self._scale is None:
            raise InputError(
                "the block of engine.precision_report() ended without a step; go through forward, backward and "
                "engine.step() within it"
            )
        parts, report = self._parts, self.report
        recipe, losses = parts.update.recipe, parts.update.loss_scales
        layers: dict[str, _Layer] = {}
        for theirs in parts.context.everyone(self._layers):
            for name, layer in theirs.items():
                if layers.setdefault(name, layer) is not layer:
                    layers[name].add(layer)
        report.loss_scale = self._scale if losses.scalers else None
        report.is_dynamic = recipe.loss_scale is not None and recipe.loss_scale.dynamic
        report.skipped, report.updates = sum(result.skipped for result in parts.results), len(parts.results)
        if recipe.compute_dtype == torch.float16:
            seen = [layer.gradients for layer in layers.values()]
            if losses.multi is None:  # else complete gradients do not carry the scale any more
                seen += [layer.weights for layer in layers.values()]
            report.room = _room(seen)
        report.layers = tuple(layer.row(name, self._scale) for name, layer in layers.items())
        report.findings = tuple(find_problems(report))


def _has_master(shard: ParamShard, parts: EngineParts) -> bool:
    model_side = shard.param if shard.source is None else shard.source.param
    return shard.param in parts.update.master_weights.masters or compute_dtype(model_side) != shard.param.dtype


def _room(seen: Sequence[TensorStats]) -> float | None:
    """How many times larger the loss scale could be, a power of two, before a gradient leaves float16."""
    largest = max((stats.largest for stats in seen), default=0.0)
    if not largest or any(stats.nonfinite for stats in seen):
        return None
    return 2.0 ** math.floor(math.log2(largest_number(torch.float16) / largest))
