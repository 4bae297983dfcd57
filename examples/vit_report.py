"""What train_vit.py shows and keeps: progress on the terminal, metrics.json, and the picture of a run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import halfmesh

LINE_EVERY_S = 10.0  # where there is no terminal: within an epoch, no more than one line in this time


@dataclass(frozen=True)
class Point:
    """Training over the last few batches, all data ranks together."""

    update: int
    epoch: float
    loss: float
    accuracy: float
    """Per cent."""
    loss_scale: float
    skipped: int
    """Updates skipped since the beginning."""
    images_per_s: float

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.3f}  accuracy {self.accuracy:5.1f} %  loss scale {self.loss_scale:g}  "
            f"skipped {self.skipped}  {self.images_per_s:.0f} images/s"
        )


class Meter:
    """Adds up loss and hits on the device; nothing is read until `take`, because each read waits for the device."""

    def __init__(self, engine: halfmesh.Engine) -> None:
        self._engine = engine
        self._reset()

    def _reset(self) -> None:
        self._sums = torch.zeros(3, device=self._engine.context.device)
        self._begin = time.perf_counter()
        self.batches = 0

    @torch.no_grad()
    def add(self, loss: torch.Tensor, output: torch.Tensor, labels: torch.Tensor) -> None:
        """Count one batch."""
        hits = (output.argmax(1) == labels).sum()
        self._sums += torch.stack([loss.detach().float() * len(labels), hits, torch.full_like(hits, len(labels))])
        self.batches += 1

    def take(self, epoch: float) -> Point:
        """The point since the last call. All ranks have to call it: the counts are summed over them."""
        self._engine.context.all_reduce(self._sums)
        loss, hits, count = self._sums.tolist()
        point = Point(
            update=self._engine.global_step,
            epoch=epoch,
            loss=loss / count,
            accuracy=100 * hits / count,
            loss_scale=self._engine.loss_scale,
            skipped=self._engine.skipped_steps,
            images_per_s=count / (time.perf_counter() - self._begin),
        )
        self._reset()
        return point


class Report:
    """Shows and remembers a run on rank 0; on other ranks every method does nothing.

    On a terminal: a bar that is updated in place. Elsewhere (a log file, CI): plain lines.
    """

    def __init__(self, epochs: int, batches: int, shown: bool) -> None:
        self.points: list[Point] = []
        self.tests: list[tuple[int, float]] = []
        self._epochs, self._shown = epochs, shown
        self._last_line = time.perf_counter()
        self._bar: Progress | None = None
        if shown and sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[numbers]}"), console=Console())
            self._task = self._bar.add_task("epoch 1", total=epochs * batches, numbers="")
            self._bar.start()

    def training(self, point: Point, batches: int) -> None:
        """`batches` more batches are done."""
        self.points.append(point)
        now = time.perf_counter()
        if self._bar is not None:
            name = f"epoch {min(int(point.epoch) + 1, self._epochs)}/{self._epochs}"
            self._bar.update(self._task, advance=batches, description=name, numbers=str(point))
        elif self._shown and now - self._last_line > LINE_EVERY_S:
            self._say(f"epoch {point.epoch:.2f}/{self._epochs}  {point}")

    def test(self, epoch: int, update: int, accuracy: float) -> None:
        """Epoch `epoch` (from 1) is over, with this test accuracy in per cent."""
        self.tests.append((update, accuracy))
        if self._shown:
            last = f"  {self.points[-1]}" if self.points else ""
            self._say(f"epoch {epoch}/{self._epochs}{last}  test {accuracy:.1f} %")

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
        tests = [{"update": update, "accuracy": accuracy} for update, accuracy in self.tests]
        metrics = {**facts, "tests": tests, "training": [asdict(point) for point in self.points]}
        picture.with_name("metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
        plot(picture, title, self.points, self.tests)


def plot(picture: Path, title: str, points: Sequence[Point], tests: Sequence[tuple[int, float]]) -> None:
    """Loss, accuracy, loss scale and skipped updates over the updates, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, whatever the machine has
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(2, 2, sharex=True)
    updates = [point.update for point in points]
    loss, accuracy, scale, skipped = panels.flat
    loss.plot(updates, [point.loss for point in points])
    loss.set(title="training loss", yscale="log")
    accuracy.plot(updates, [point.accuracy for point in points], label="training")
    accuracy.plot([update for update, _ in tests], [value for _, value in tests], "o-", markersize=3, label="test")
    accuracy.set(title="accuracy, %")
    accuracy.legend(loc="lower right")
    scale.step(updates, [point.loss_scale for point in points], where="post")
    scale.set_yscale("log", base=2)
    scale.set(title="loss scale", xlabel="update")
    skipped.step(updates, [point.skipped for point in points], where="post")
    skipped.set(title="skipped updates, so far", xlabel="update")
    skipped.yaxis.get_major_locator().set_params(integer=True)
    for panel in panels.flat:
        panel.grid(alpha=0.3)
    figure.savefig(picture, dpi=100)
