"""What the examples show and keep of a run: progress on the terminal, metrics.json, and a picture."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 10.0  # where there is no terminal: within an epoch, no more than one line in this time


@dataclass(frozen=True)
class Point:
    """Training over the last few batches, all data ranks together. Its text is what is shown of it."""

    update: int
    epoch: float
    loss: float
    loss_scale: float
    skipped: int
    """Updates skipped since the beginning."""


AnyPoint = TypeVar("AnyPoint", bound=Point)


class Report(Generic[AnyPoint]):
    """Shows and remembers a run on rank 0; on other ranks every method does nothing.

    On a terminal: a bar that is updated in place. Elsewhere (a log file, CI): plain lines.

    Attributes:
        measured: what a test after an epoch gives, in metrics.json.
    """

    measured: ClassVar[str]

    def __init__(self, epochs: int, batches: int, shown: bool) -> None:
        self.points: list[AnyPoint] = []
        self.tests: list[tuple[int, float]] = []
        self._epochs, self._shown = epochs, shown
        self._last_line = time.perf_counter()
        self._bar: Progress | None = None
        if shown and sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[numbers]}"), console=Console())
            self._task = self._bar.add_task("epoch 1", total=epochs * batches, numbers="")
            self._bar.start()

    def test_text(self, value: float) -> str:
        """What is shown of a test."""
        raise NotImplementedError

    def draw(self, left: Any, right: Any) -> None:
        """Draw loss and tests on the upper two panels of the picture."""
        raise NotImplementedError

    def training(self, point: AnyPoint, batches: int) -> None:
        """`batches` more batches are done."""
        self.points.append(point)
        now = time.perf_counter()
        if self._bar is not None:
            name = f"epoch {min(int(point.epoch) + 1, self._epochs)}/{self._epochs}"
            self._bar.update(self._task, advance=batches, description=name, numbers=str(point))
        elif self._shown and now - self._last_line > LINE_EVERY_S:
            self._say(f"epoch {point.epoch:.2f}/{self._epochs}  {point}")

    def test(self, epoch: int, update: int, value: float) -> None:
        """Epoch `epoch` (from 1) is over, and the test gave this."""
        self.tests.append((update, value))
        if self._shown:
            last = f"  {self.points[-1]}" if self.points else ""
            self._say(f"epoch {epoch}/{self._epochs}{last}  {self.test_text(value)}")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def _say(self, line: str) -> None:
        self._last_line = time.perf_counter()
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, flush=True)

    def write(self, picture: Path, title: str, facts: dict[str, Any]) -> None:
        """The picture, and metrics.json beside it. `facts` go into the latter."""
        if not self._shown:
            return
        picture.parent.mkdir(parents=True, exist_ok=True)
        tests = [{"update": update, self.measured: value} for update, value in self.tests]
        metrics = {**facts, "tests": tests, "training": [asdict(point) for point in self.points]}
        picture.with_name("metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
        self._plot(picture, title)

    def _plot(self, picture: Path, title: str) -> None:
        """Four panels over the updates, as a PNG: two of `draw`, loss scale and skipped updates."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, whatever the machine has
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 6), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title)
        panels = figure.subplots(2, 2, sharex=True)
        left, right, scale, skipped = panels.flat
        self.draw(left, right)
        updates = [point.update for point in self.points]
        scale.step(updates, [point.loss_scale for point in self.points], where="post")
        scale.set_yscale("log", base=2)
        scale.set(title="loss scale", xlabel="update")
        skipped.step(updates, [point.skipped for point in self.points], where="post")
        skipped.set(title="skipped updates, so far", xlabel="update")
        skipped.yaxis.get_major_locator().set_params(integer=True)
        for panel in panels.flat:
            panel.grid(alpha=0.3)
        figure.savefig(picture, dpi=100)
