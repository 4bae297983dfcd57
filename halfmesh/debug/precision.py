"""Measures the numbers of each layer in one real update, and what in them is worth a change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..amp.recipe import HALF, Recipe
from ..errors import InputError, shorten
from ..loop.parts import EngineHook, EngineParts
from ..shard import ParamShard, compute_dtype
from .precision_report import LayerPrecision, PrecisionReport
from .probes import Probes, Visit
from .tensor_stats import TensorStats, largest_number, measure, name_of

MANY_SKIPPED = 0.05
"""A dynamic scale at its place overflows about once in `growth_interval` updates (2000: 0.05 %); this is a hundred
times as often."""
MUCH_SUBNORMAL = 0.05
"""Where about 5 % of a speech model's weight gradients were too small for fp16, it lost 80 % in accuracy without fp32
masters (Micikevicius and others, 2018, "Mixed Precision Training", section 3.1)."""
HIGH_OUTPUT = 0.25
"""Twice as large, and twice as large again, and it overflows: a choice of ours."""
HIGH_SCALE = 2.0**24
"""Where apex.amp's dynamic scale stops (its max_loss_scale). A gradient of 2**-24 is 1 then."""
MULTIPLE = 8
"""Elements of half precision in 16 bytes. Matrix products on tensor cores are most efficient where the sizes are
multiples of that (NVIDIA, "Matrix Multiplication Background User's Guide", section on tensor core requirements)."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_IMAGE_CHANNELS = 4
"""Channels that a first layer may have: no other choice, and libraries have kernels of their own for it."""


@dataclass
class _Layer:
    """What was seen of one module that has parameters of its own, on one rank; or, added up, on several."""

    kind: str
    param_dtype: torch.dtype
    masters: bool
    odd_sizes: tuple[str, ...]
    trained: frozenset[str]
    output_dtype: torch.dtype | None = None
    outputs: TensorStats = field(default_factory=TensorStats)
    gradient_dtype: torch.dtype | None = None
    gradients: TensorStats = field(default_factory=TensorStats)
    """Of outputs."""
    weight_dtype: torch.dtype | None = None
    weights: TensorStats = field(default_factory=TensorStats)
    """Of the parameters' complete gradients."""
    got_gradient: frozenset[str] = frozenset()

    def add(self, other: _Layer) -> None:
        """What another rank has seen."""
        self.output_dtype = self.output_dtype or other.output_dtype
        self.gradient_dtype = self.gradient_dtype or other.gradient_dtype
        self.weight_dtype = self.weight_dtype or other.weight_dtype
        self.outputs += other.outputs
        self.gradients += other.gradients
        self.weights += other.weights
        self.trained |= other.trained
        self.got_gradient |= other.got_gradient
        self.masters |= other.masters


class PrecisionSurvey(Probes, EngineHook):
    """Measures each layer until `finish`, which fills `report`."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        update = parts.update
        self.report = PrecisionReport(name_of(update.recipe.compute_dtype))
        shards = [shard for shard in update.master_weights.trained if shard.param.requires_grad]
        masters = {shard.name: _has_master(shard, parts) for shard in shards}
        self._layers: dict[str, _Layer] = {}
        for name, module in parts.model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if own:
                names = frozenset(f"{name}.{p}" if name else p for p in own) & masters.keys()
                dtype = compute_dtype(next(iter(own.values())))
                sizes = odd_sizes(module) if update.recipe.compute_dtype in HALF else ()
                self._layers[name] = _Layer(
                    type(module).__name__, dtype, any(masters[p] for p in names), sizes, trained=names
                )
        self._scale = 1.0
        self._has_stepped = False

    def left(self, visit: Visit, outputs: Sequence[torch.Tensor]) -> None:
        layer = self._layers.get(visit.name) if isinstance(visit.module, nn.Module) else None
        for tensor in outputs if layer is not None else ():
            if layer is not None and tensor.is_floating_point():
                layer.output_dtype = layer.output_dtype or tensor.dtype
                layer.outputs += measure(tensor)

    def gradient(self, visit: Visit, of_input: bool, grad: torch.Tensor, order: int) -> None:
        layer = None if of_input else self._layers.get(visit.name)
        if layer is not None:
            layer.gradient_dtype = layer.gradient_dtype or grad.dtype
            layer.gradients += measure(grad)

    def before_step(self) -> None:
        """What of the parameters' gradients the optimizer steps with on this rank."""
        update = self._parts.update
        self._scale, self._has_stepped = update.loss_scales.current()[0], True
        for layer in self._layers.values():
            layer.weights = TensorStats()  # inside a cycle those of the next microbatch are sums with these
        for shard, grad in update.gradients().items():
            layer_or_none = self._layers.get(shard.name.rpartition(".")[0])
            if layer_or_none is not None:
                layer_or_none.weight_dtype = grad.dtype
                layer_or_none.weights += measure(grad)
                layer_or_none.got_gradient |= {shard.name}

    def finish(self) -> None:
        """Fill the report, the same over all ranks, which call this together.

        Raises:
            InputError: no step was taken since the survey began.
        """
        if not self._has_stepped:
            raise InputError(
                "the block of engine.precision_report() ended without a step; go through forward, backward and "
                "engine.step() within it"
            )
        parts, report = self._parts, self.report
        recipe, losses = parts.update.recipe, parts.update.loss_scales
        layers = _joined(parts.context.everyone(self._layers))
        report.loss_scale = self._scale if losses.scalers else None
        report.is_dynamic = recipe.loss_scale is not None and recipe.loss_scale.dynamic
        report.skipped, report.updates = sum(result.skipped for result in parts.results), len(parts.results)
        if recipe.compute_dtype == torch.float16:
            report.room = _room(layers, is_unscaled=losses.multi is not None)
        report.layers = tuple(_row(name, layer, self._scale) for name, layer in layers.items())
        report.findings = tuple(line for rule in _RULES for line in rule(report, recipe))


def _has_master(shard: ParamShard, parts: EngineParts) -> bool:
    model_side = shard.param if shard.source is None else shard.source.param
    return shard.param in parts.update.master_weights.masters or compute_dtype(model_side) != shard.param.dtype


def _joined(surveys: Sequence[Mapping[str, _Layer]]) -> dict[str, _Layer]:
    """What all ranks have seen, layer by layer. (Stages of a pipeline follow each other as ranks do.)"""
    joined: dict[str, _Layer] = {}
    for survey in surveys:
        for name, layer in survey.items():
            if name in joined:
                joined[name].add(layer)
            else:
                joined[name] = layer
    return joined


def _room(layers: Mapping[str, _Layer], is_unscaled: bool) -> float | None:
    """How many times larger the loss scale could be, a power of two, before a gradient leaves float16.

    Args:
        is_unscaled: complete gradients do not carry the scale any more.
    """
    seen = [layer.gradients for layer in layers.values()]
    seen += [] if is_unscaled else [layer.weights for layer in layers.values()]
    largest = max((stats.largest for stats in seen), default=0.0)
    if not largest or any(stats.nonfinite for stats in seen):
        return None
    return 2.0 ** math.floor(math.log2(largest_number(torch.float16) / largest))


def _row(name: str, layer: _Layer, scale: float) -> LayerPrecision:
    outputs, gradients = layer.outputs, layer.gradients
    return LayerPrecision(
        name=name,
        kind=layer.kind,
        param_dtype=name_of(layer.param_dtype),
        masters=layer.masters,
        output_dtype=name_of(layer.output_dtype),
        largest_output=outputs.largest if layer.output_dtype else None,
        output_share=outputs.largest / largest_number(layer.output_dtype) if layer.output_dtype else None,
        gradient_dtype=name_of(layer.gradient_dtype),
        largest_gradient=gradients.largest / scale if layer.gradient_dtype else None,
        gradient_share=gradients.largest / largest_number(layer.gradient_dtype) if layer.gradient_dtype else None,
        zero_gradients=_share(gradients.zeros, gradients, layer.gradient_dtype),
        subnormal_gradients=_share(gradients.subnormal, gradients, layer.gradient_dtype),
        subnormal_weight_gradients=_share(layer.weights.subnormal, layer.weights, layer.weight_dtype),
        nonfinite=outputs.nonfinite + gradients.nonfinite + layer.weights.nonfinite,
        without_gradient=tuple(sorted(layer.trained - layer.got_gradient)),
        odd_sizes=layer.odd_sizes,
    )


def _share(count: int, stats: TensorStats, dtype: torch.dtype | None) -> float | None:
    return count / stats.count if dtype == torch.float16 and stats.count else None


# -- findings --------------------------------------------------------------------------------------------------------


def _overflow(report: PrecisionReport, recipe: Recipe) -> Iterator[str]:
    names = _names(report, lambda layer: layer.nonfinite > 0)
    if names:
        yield f"inf or nan in outputs or gradients of {shorten(names)}: this update is skipped, or spoilt"


def _scale(report: PrecisionReport, recipe: Recipe) -> Iterator[str]:
    if report.loss_scale is not None:
        yield from judge_scale(report.loss_scale)
    if report.skipped > MANY_SKIPPED * report.updates:
        yield (
            f"{report.skipped} of the last {report.updates} updates were skipped: the scale has not found its place "
            "yet (the first updates of a run), or gradients overflow at any scale; clip_grad_norm does not help there, "
            "a lower learning rate or bf16 does"
        )


def judge_scale(scale: float) -> Iterator[str]:
    """What is wrong with a loss scale that is very low or very high, if it is."""
    if scale < 1:
        yield (
            f"the loss scale is {scale:g}, below 1: gradients are made smaller, so they overflow by themselves. Look "
            "for inf or nan (debug='nonfinite' names the module), lower the learning rate, or use bf16"
        )
    if scale > HIGH_SCALE:
        yield (
            f"the loss scale is {scale:g}, above 2**24: gradients are so small that nothing overflows. Look whether "
            "the loss is divided too much, whether it depends on the parameters at all, and whether they learn; "
            "max_scale of mode 'naive' (max_loss_scale of 'apex') is a ceiling"
        )


def _outputs(report: PrecisionReport, recipe: Recipe) -> Iterator[str]:
    names = _names(report, lambda row: row.output_dtype == "float16" and (row.output_share or 0) > HIGH_OUTPUT)
    if names:
        yield (
            f"outputs of {shorten(names)} reach above {HIGH_OUTPUT:.0%} of float16's largest number: use bf16, or a "
            "norm before these layers"
        )


def _subnormal(report: PrecisionReport, recipe: Recipe) -> Iterator[str]:
    names = _names(
        report, lambda row: max(row.subnormal_gradients or 0, row.subnormal_weight_gradients or 0) > MUCH_SUBNORMAL
    )
    if not names:
        return
    how = "the loss scale has no room above, as gradients elsewhere are large: use bf16"
    if (report.room or 1) >= 2:
        grows = " (a dynamic one grows by itself: start higher, or with a shorter growth_interval)"
        how = f"the loss scale could be {report.room:.0f} times larger{grows * report.is_dynamic}"
    yield (
        f"more than {MUCH_SUBNORMAL:.0%} of the gradients of {shorten(names)} are below 6.1e-5, where float16 loses "
        f"digits, and smaller ones are zero: {how}"
    )


def _dtypes(report: PrecisionReport, recipe: Recipe) -> Iterator[str]:
    halves = {name_of(dtype) for dtype in HALF}
    if recipe.param_dtype in HALF and not recipe.keep_batchnorm_fp32:
        wide = _names(report, lambda layer: layer.param_dtype not in halves)
        if wide:
            yield f"{shorten(wide)} have fp32 parameters within a model in {name_of(recipe.param_dtype)}"
    if recipe.param_dtype in (None, torch.float32):
        narrow = _names(report, lambda layer: layer.param_dtype in halves)
        if narrow:
            yield (
                f"{shorten(narrow)} have half-precision parameters, without fp32 masters: small updates are lost; "
                "build them in fp32"
            )


def _without_gradient(report: PrecisionReport, recipe: Recipe) -> Iterator[str]:
    names = [name for layer in report.layers for name in layer.without_gradient]
    if names:
        yield f"no gradient came to {shorten(names)}: they are not used for this batch, or cut off (detach, no_grad)"


def _sizes(report: PrecisionReport, recipe: Recipe) -> Iterator[str]:
    odd = [f"{layer.name} ({', '.join(layer.odd_sizes)})" for layer in report.layers if layer.odd_sizes]
    if odd:
        yield f"sizes that are no multiple of 8, which tensor cores want in half precision: {shorten(odd)}"


_RULES: list[Callable[[PrecisionReport, Recipe], Iterator[str]]] = [
    _overflow,
    _scale,
    _outputs,
    _subnormal,
    _dtypes,
    _without_gradient,
    _sizes,
]


def _names(report: PrecisionReport, chosen: Callable[[LayerPrecision], bool]) -> list[str]:
    return [layer.name or "the model itself" for layer in report.layers if chosen(layer)]


def odd_sizes(module: nn.Module) -> tuple[str, ...]:
    """The sizes of what this rank has of `module` that are no multiple of `MULTIPLE`, as "out_features=10"."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")  # in a tensor group its own part
    is_matrix = weight is not None and weight.dim() == 2
    sizes: dict[str, int] = {}
    if isinstance(module, nn.Linear):
        rows, columns = weight.shape if is_matrix and weight is not None else (module.out_features, module.in_features)
        sizes = {"in_features": columns, "out_features": rows}
    elif isinstance(module, nn.Embedding):
        sizes = {"embedding_dim": weight.shape[1] if is_matrix and weight is not None else module.embedding_dim}
    elif isinstance(module, _CONVOLUTIONS):
        sizes = {"in_channels": module.in_channels} if module.in_channels > _IMAGE_CHANNELS else {}
        sizes["out_channels"] = module.out_channels
    return tuple(f"{name}={size}" for name, size in sizes.items() if size % MULTIPLE)
