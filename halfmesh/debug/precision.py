"""`engine.precision_report()`: measures the range of each layer in a real update, and reports what to change."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from ..errors import InputError, shorten
from ..utils.engine_hook import Progress
from ..utils.param_shard import ParamShard, compute_dtype
from ..utils.tensors import dtype_name
from .probes import Probes, TensorStats, Visit, measure

if TYPE_CHECKING:
    from ..amp.optimizer import MixedPrecisionOptimizer
    from ..checkpoint.state import ShardedState
    from ..parallel.mesh import ParallelContext

# A speech model with about 5 % of its weight gradients too small for fp16 lost 80 % in accuracy without fp32 masters
# (Micikevicius and others, 2018, "Mixed Precision Training", section 3.1).
MUCH_SUBNORMAL = 0.05
# An output of this share overflows when it doubles twice. halfmesh's choice, without a source.
HIGH_OUTPUT = 0.25
# The upper bound of apex.amp's dynamic scale (its max_loss_scale). It makes a gradient of 2**-24 a 1.
HIGH_SCALE = 2.0**24


@dataclass(frozen=True)
class LayerPrecision:
    """The numbers of one module that has direct parameters. Shares are from 0 to 1. None: not seen, or not in float16.

    Attributes:
        name: the module's name in the full model.
        kind: the module's class.
        param_dtype: the dtype of the parameters in its computation.
        masters: True if the optimizer steps wider copies of these parameters.
        output_dtype: the dtype of its output. "" if it was not called as a module.
        largest_output: the largest finite magnitude of its output.
        output_share: `largest_output` as a share of the largest number of `output_dtype`.
        gradient_dtype: the dtype of the gradient of its output.
        largest_gradient: the largest finite magnitude of that gradient, divided by the loss scale.
        gradient_share: the same magnitude, with the loss scale, as a share of the largest number of `gradient_dtype`.
        zero_gradients: the share of that gradient's elements that are zero, exactly (ReLU) or because they are too
            small for float16.
        subnormal_gradients: the share of its elements that are not zero but below 6.1e-5, where float16
            loses digits.
        subnormal_weight_gradients: the same share in the complete gradients of its parameters.
        nonfinite: the number of elements that were inf or nan.
    """

    name: str
    kind: str
    param_dtype: str
    masters: bool
    output_dtype: str
    largest_output: float | None
    output_share: float | None
    gradient_dtype: str
    largest_gradient: float | None
    gradient_share: float | None
    zero_gradients: float | None
    subnormal_gradients: float | None
    subnormal_weight_gradients: float | None
    nonfinite: int


@dataclass
class PrecisionReport:
    """The effect of the config's precision on the numbers of each layer, in one update.

    halfmesh fills it when the block of `engine.precision_report()` ends. `print` shows it as a table.

    Attributes:
        compute_dtype: the dtype of matrix products.
        loss_scale: the loss scale of this update, for the first loss. None without loss scaling.
        is_dynamic: True if the loss scale is dynamic.
        skipped: the number of the last `updates` that were skipped.
        updates: the number of updates that `skipped` covers: 60 at most, this one included.
        room: the factor by which the loss scale could grow before a measured gradient overflows float16. None if no
            gradient was measured in float16, or one overflowed.
        layers: the modules with direct parameters, in the order of the model.
        findings: recommended changes, with their reasons.
    """

    compute_dtype: str
    loss_scale: float | None = None
    is_dynamic: bool = False
    skipped: int = 0
    updates: int = 0
    room: float | None = None
    layers: tuple[LayerPrecision, ...] = ()
    findings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return a table of at most 120 columns, followed by the findings."""
        title = [f"precision report: {self.compute_dtype}"]
        if self.loss_scale is not None:
            title.append(f"{'dynamic' if self.is_dynamic else 'static'} loss scale {self.loss_scale:g}")
        if self.room is not None:
            title.append(f"room above it x{self.room:.0f}")
        title.append(f"{self.skipped} of the last {self.updates} updates skipped")
        table = ["  ".join(name.ljust(width) for name, width, _ in _COLUMNS)]
        table += ["  ".join(cell(row).ljust(width) for _, width, cell in _COLUMNS) for row in self.layers]
        findings = [f"- {finding}" for finding in self.findings] or ["no problems found"]
        wrap = partial(textwrap.fill, width=120, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join([", ".join(title), *map(str.rstrip, table), *map(wrap, findings)])


def _dtype(name: str) -> str:
    return name.replace("bfloat", "bf").replace("float", "fp") or "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return "<0.01%" if 0 < share < 1e-4 else f"{100 * share:.2g}%"


_COLUMNS: tuple[tuple[str, int, Callable[[LayerPrecision], str]], ...] = (
    ("module", 30, lambda row: (row.name if len(row.name) <= 30 else f"...{row.name[-27:]}") or "(the model itself)"),
    ("params", 13, lambda row: _dtype(row.param_dtype) + "+masters" * row.masters),
    ("output", 6, lambda row: _dtype(row.output_dtype)),
    ("|output|", 9, lambda row: _number(row.largest_output)),
    ("of max", 7, lambda row: _percent(row.output_share)),
    ("|grad|", 9, lambda row: _number(row.largest_gradient)),
    ("of max", 7, lambda row: _percent(row.gradient_share)),
    ("zero", 7, lambda row: _percent(row.zero_gradients)),
    ("subn.", 7, lambda row: _percent(row.subnormal_gradients)),
    ("w.subn.", 7, lambda row: _percent(row.subnormal_weight_gradients)),
)


# -- findings --------------------------------------------------------------------------------------------------------


def find_problems(report: PrecisionReport) -> Iterator[str]:
    """The findings."""

    def names(chosen: Callable[[LayerPrecision], bool]) -> str:
        return shorten([row.name or "the model itself" for row in report.layers if chosen(row)])

    if bad := names(lambda row: row.nonfinite > 0):
        yield f"inf or nan in outputs or gradients of {bad}: this update is skipped, or spoils the weights"
    if report.loss_scale is not None:
        yield from judge_scale(report.loss_scale)
    if high := names(lambda row: row.output_dtype == "float16" and (row.output_share or 0) > HIGH_OUTPUT):
        yield (
            f"outputs of {high} exceed {HIGH_OUTPUT:.0%} of float16's largest number: use bf16, or a norm before these"
        )
    if small := names(
        lambda row: max(row.subnormal_gradients or 0, row.subnormal_weight_gradients or 0) > MUCH_SUBNORMAL
    ):
        how = "the loss scale cannot grow, because other gradients are large: use bf16"
        if (report.room or 1) >= 2:
            how = f"the loss scale could be {report.room:.0f} times larger"
        yield (
            f"more than {MUCH_SUBNORMAL:.0%} of the gradients of {small} are below 6.1e-5, where float16 loses digits, "
            f"and smaller ones are zero: {how}"
        )


def judge_scale(scale: float) -> Iterator[str]:
    """Yield the problem of a loss scale that is very low or very high."""
    if scale < 1:
        yield (
            f"the loss scale is {scale:g}, below 1: gradients overflow by themselves. Look for inf or nan "
            "(debug='nonfinite' names the module), lower the learning rate, or use bf16"
        )
    if scale > HIGH_SCALE:
        yield (
            f"the loss scale is {scale:g}, above 2**24: gradients are so small that nothing overflows. Check whether "
            "the loss is divided too often, or does not depend on the parameters"
        )


# -- measuring ---------------------------------------------------------------------------------------------------------


# What is measured of a module: its outputs, their gradients, and the complete gradients of its parameters.
Part = Literal["outputs", "gradients", "weights"]


def _row(name: str, kind: str, param_dtype: torch.dtype, masters: bool, scale: float, *seen: TensorStats) -> Any:
    """The measurements of a module, by all ranks together, for the report."""
    outputs, gradients, weights = seen
    values: list[Any] = [*_range(outputs, 1.0), *_range(gradients, scale), _share(gradients.zeros, gradients)]
    values += [_share(gradients.subnormal, gradients), _share(weights.subnormal, weights)]
    values.append(sum(stats.inf + stats.nan for stats in seen))
    return LayerPrecision(name, kind, dtype_name(param_dtype), masters, *values)


def _range(stats: TensorStats, scale: float) -> tuple[str, float | None, float | None]:
    """The dtype, the largest magnitude / `scale`, and what share of the dtype's largest number that is."""
    if stats.dtype is None:
        return "", None, None
    return dtype_name(stats.dtype), stats.largest / scale, stats.largest / torch.finfo(stats.dtype).max


def _share(count: int, stats: TensorStats) -> float | None:
    return count / stats.count if stats.dtype == torch.float16 and stats.count else None


class PrecisionSurvey(Probes):
    """Measures each layer until `finish`, which fills `report`."""

    def __init__(self, state: ShardedState, stages: Collection[nn.Module], progress: Progress) -> None:
        super().__init__(state.model, state.parallel_model, stages)
        self._update = update = state.update
        self._progress = progress
        self.report = PrecisionReport(dtype_name(update.recipe.compute_dtype))
        self._kinds: dict[str, tuple[str, torch.dtype]] = {}  # of modules that have direct parameters
        for name, module in state.model.named_modules():
            for param in module.parameters(recurse=False):
                self._kinds.setdefault(name, (type(module).__name__, compute_dtype(param)))
        trained = [shard for shard in update.master_weights.trained if shard.param.requires_grad]
        self._with_masters = {_owner(shard) for shard in trained if _has_master(shard, update)}
        self._seen: dict[tuple[str, Part], TensorStats] = {}
        self._scale: float | None = None  # no step was taken yet

    def _measure(self, name: str, part: Part, tensor: torch.Tensor) -> None:
        if name in self._kinds and tensor.is_floating_point():
            self._seen[name, part] = self._seen.get((name, part), TensorStats()) + measure(tensor)

    def left(self, visit: Visit, outputs: Sequence[torch.Tensor]) -> None:
        for output in outputs:
            self._measure(visit.name, "outputs", output)

    def gradient(self, visit: Visit, grad: torch.Tensor, order: int) -> None:
        self._measure(visit.name, "gradients", grad)

    def before_step(self) -> None:
        """Measure the gradients that this rank's optimizer steps with."""
        self._scale = self._update.loss_scales.current()[0]
        for name in self._kinds:
            self._seen.pop((name, "weights"), None)  # inside a cycle those of the next microbatch are sums with these
        for shard, grad in self._update.gradients().items():
            self._measure(_owner(shard), "weights", grad)

    def finish(self, context: ParallelContext) -> None:
        """Fill the report, the same over all ranks of `context`, which call this together.

        Raises:
            InputError: no step was taken since the survey began.
        """
        if self._scale is None:
            raise InputError(
                "the block of engine.precision_report() ended without a step; call engine.step() inside it"
            )
        report, results = self.report, self._progress.results
        recipe, losses = self._update.recipe, self._update.loss_scales
        kinds: dict[str, tuple[str, torch.dtype]] = {}
        with_masters: set[str] = set()
        seen: defaultdict[tuple[str, Part], TensorStats] = defaultdict(TensorStats)
        for their_kinds, theirs_with_masters, theirs in context.everyone((self._kinds, self._with_masters, self._seen)):
            kinds = {**kinds, **their_kinds}
            with_masters |= theirs_with_masters
            for key, stats in theirs.items():
                seen[key] += stats
        report.loss_scale = self._scale if losses.scalers else None
        report.is_dynamic = recipe.loss_scale is not None and recipe.loss_scale.dynamic
        report.skipped, report.updates = sum(result.skipped for result in results), len(results)
        if recipe.compute_dtype == torch.float16:
            # Of several losses complete gradients are unscaled already.
            scaled = [
                stats
                for (_, part), stats in seen.items()
                if part == "gradients" or (part == "weights" and not losses.several)
            ]
            report.room = _room(scaled)
        report.layers = tuple(
            _row(name, *kind, name in with_masters, self._scale, *(seen[name, part] for part in get_args(Part)))
            for name, kind in kinds.items()
        )
        report.findings = tuple(find_problems(report))


def _owner(shard: ParamShard) -> str:
    return shard.name.rpartition(".")[0]


def _has_master(shard: ParamShard, update: MixedPrecisionOptimizer) -> bool:
    model_side = shard.param if shard.source is None else shard.source.param
    return shard.param in update.master_weights.masters or compute_dtype(model_side) != shard.param.dtype


def _room(seen: Sequence[TensorStats]) -> float | None:
    """The factor, a power of two, by which the loss scale could grow before a gradient overflows float16."""
    largest = max((stats.largest for stats in seen), default=0.0)
    if not largest or any(stats.inf + stats.nan for stats in seen):
        return None
    return 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / largest))
