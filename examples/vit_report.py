"""What train_vit.py measures: loss and accuracy in training, and accuracy in tests."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import run_report
import torch

import halfmesh


@dataclass(frozen=True)
class Point(run_report.Point):
    """Training over the last few batches, all data ranks together."""

    accuracy: float
    """Per cent."""
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
        """The point since the last call. All ranks have to call it: the counts are summed over the data ranks."""
        self._engine.context.all_reduce(self._sums, "dp")
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


class Report(run_report.Report[Point]):
    """Tests give the accuracy in per cent."""

    measured = "accuracy"

    def test_text(self, value: float) -> str:
        return f"test {value:.1f} %"

    def draw(self, left: Any, right: Any) -> None:
        updates = [point.update for point in self.points]
        left.plot(updates, [point.loss for point in self.points])
        left.set(title="training loss", yscale="log")
        right.plot(updates, [point.accuracy for point in self.points], label="training")
        right.plot([update for update, _ in self.tests], [v for _, v in self.tests], "o-", markersize=3, label="test")
        right.set(title="accuracy, %")
        right.legend(loc="lower right")
