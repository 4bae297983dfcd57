"""What `engine.precision_report()` gives: a value that prints as a table."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

_COLUMNS = 120
_NAME = 30
"""Characters of a module's name; of longer ones the end is shown."""
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "": "-"}
_HEADER = ("module", "params", "output", "|output|", "of max", "|grad|", "of max", "zero", "subn.", "w.subn.")
_WIDTHS = (_NAME, 13, 6, 9, 7, 9, 7, 7, 7, 7)


@dataclass(frozen=True)
class LayerPrecision:
    """One module that has parameters of its own. Shares are from 0 to 1; None: not seen, or not in float16.

    Attributes:
        name: in the whole model.
        kind: its class.
        param_dtype: in which it computes with its parameters; `masters`: whether the optimizer steps wider ones.
        output_dtype: of what it returned; "" where it was not called as a module.
        largest_output: the largest finite magnitude; `output_share`: of the largest number of that dtype.
        gradient_dtype: of the gradient of its output.
        largest_gradient: of that gradient, divided by the loss scale. `gradient_share`: multiplied by it, of the
            largest number of the dtype.
        zero_gradients: share of that gradient's elements that are zero, by right (ReLU) or as too small for float16;
            `subnormal_gradients`: that are so small, below 6.1e-5, that float16 has lost some of their digits.
        subnormal_weight_gradients: as `subnormal_gradients`, of the complete gradients of its parameters.
        nonfinite: how many numbers were inf or nan.
        without_gradient: parameters that are trained, and got no gradient in this update.
        odd_sizes: its sizes that are no multiples of 8, in half precision ("out_features=10").
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
    without_gradient: tuple[str, ...]
    odd_sizes: tuple[str, ...]


@dataclass
class PrecisionReport:
    """What the config's precision does to the numbers of each layer, in one update; filled when the block of
    `engine.precision_report()` ends. `print` shows it as a table.

    Attributes:
        compute_dtype: of matrix products.
        loss_scale: of this update (of the first loss); None: it is not scaled.
        is_dynamic: whether the scale moves.
        skipped: how many of the last `updates` (60 at most, this one included) were skipped.
        room: how many times larger the loss scale could be before a gradient that was seen leaves float16; None: there
            was none, or one has left.
        layers: in the order of the model.
        findings: what is worth a change, and which.
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
        """As plain values, for JSON."""
        return dict(_plain(asdict(self)))

    def __str__(self) -> str:
        """A table of at most 120 columns, then findings."""
        rows = [_HEADER, *map(_cells, self.layers)]
        table = ["  ".join(_fitted(cell, width) for cell, width in zip(row, _WIDTHS, strict=True)) for row in rows]
        findings = [f"- {finding}" for finding in self.findings] or ["nothing that is worth a change was found"]
        first, *rest = [_wrapped(line) for line in [self._first_line(), *findings]]
        return "\n".join([first, *map(str.rstrip, table), *rest])

    def _first_line(self) -> str:
        words = [f"precision report: {self.compute_dtype}"]
        if self.loss_scale is not None:
            words.append(f"{'dynamic' if self.is_dynamic else 'static'} loss scale {self.loss_scale:g}")
        if self.room is not None:
            words.append(f"room above it x{self.room:.0f}")
        words.append(f"{self.skipped} of the last {self.updates} updates skipped")
        return ", ".join(words)


def _cells(layer: LayerPrecision) -> tuple[str, ...]:
    params = _SHORT.get(layer.param_dtype, layer.param_dtype) + ("+masters" if layer.masters else "")
    return (
        layer.name or "(the model itself)",
        params,
        _SHORT.get(layer.output_dtype, layer.output_dtype),
        _number(layer.largest_output),
        _percent(layer.output_share),
        _number(layer.largest_gradient),
        _percent(layer.gradient_share),
        _percent(layer.zero_gradients),
        _percent(layer.subnormal_gradients),
        _percent(layer.subnormal_weight_gradients),
    )


def _fitted(cell: str, width: int) -> str:
    if width != _NAME:
        return cell.ljust(width)
    return cell.ljust(width) if len(cell) <= width else "..." + cell[3 - width :]


def _wrapped(line: str) -> str:
    return "\n".join(textwrap.wrap(line, _COLUMNS, subsequent_indent="  ", break_on_hyphens=False))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return "<0.01%" if 0 < share < 1e-4 else f"{100 * share:.2g}%"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
