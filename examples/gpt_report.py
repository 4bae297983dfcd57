"""What train_gpt.py measures: the loss of each update, and the loss on held-out text."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import run_report
import torch

import halfmesh


def bits_per_byte(loss: float) -> float:
    """A loss per byte in nats, in bits: what a perfect compressor that knows the model would make of each byte."""
    return loss / math.log(2)


@dataclass(frozen=True)
class Point(run_report.Point):
    """Training over the last few updates, all data ranks together."""

    losses: tuple[float, ...]
    """Of each of these updates; those of a cycle of accumulation are one."""
    bytes_per_s: float

    def __str__(self) -> str:
        return (
            f"update {self.update}  loss {self.loss:.3f}  loss scale {self.loss_scale:g}  skipped {self.skipped}  "
            f"{self.bytes_per_s:.0f} bytes/s"
        )


class Meter:
    """Adds up the loss of each update on the device; nothing is read until `take`, because each read waits for it."""

    def __init__(self, engine: halfmesh.Engine) -> None:
        self._engine = engine
        self._update = engine.global_step
        self._begin_update()
        self._reset()

    def _begin_update(self) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=self._engine.context.device)
        self._count = 0

    def _reset(self) -> None:
        self._sums: list[torch.Tensor] = []
        self._counts: list[int] = []
        self._begin = time.perf_counter()
        self.batches = 0

    @property
    def updates(self) -> int:
        """Updates since the last `take`."""
        return len(self._sums)

    @torch.no_grad()
    def add(self, loss: torch.Tensor, targets: torch.Tensor) -> None:
        """Count one batch, after engine.step()."""
        self._sum += loss.detach().double() * targets.numel()
        self._count += targets.numel()
        self.batches += 1
        if self._engine.global_step > self._update:
            self._update = self._engine.global_step
            self._sums.append(self._sum)
            self._counts.append(self._count)
            self._begin_update()

    def take(self, epoch: float) -> Point:
        """The point since the last call. All ranks have to call it: the sums are joined over the data ranks."""
        context = self._engine.context
        sums = torch.stack(self._sums)
        context.all_reduce(sums, "dp")
        counts = [count * context.dp_size for count in self._counts]  # training gives all data ranks as many windows
        point = Point(
            update=self._update,
            epoch=epoch,
            loss=sums.sum().item() / sum(counts),
            losses=tuple(loss / count for loss, count in zip(sums.tolist(), counts, strict=True)),
            loss_scale=self._engine.loss_scale,
            skipped=self._engine.skipped_steps,
            bytes_per_s=sum(counts) / (time.perf_counter() - self._begin),
        )
        self._reset()
        return point


class Report(run_report.Report[Point]):
    """Tests give the mean loss on held-out text, per byte."""

    measured = "loss"

    @property
    def losses(self) -> list[float]:
        """Of each update so far."""
        return [loss for point in self.points for loss in point.losses]

    def test_text(self, value: float) -> str:
        return f"validation loss {value:.3f}, {bits_per_byte(value):.2f} bits per byte"

    def draw(self, left: Any, right: Any) -> None:
        updates = [update for update, _ in self.tests]
        left.plot(range(1, len(self.losses) + 1), self.losses, alpha=0.6, label="training, each update")
        left.plot(updates, [loss for _, loss in self.tests], "o-", markersize=3, label="validation")
        left.set(title="loss")
        left.legend(loc="upper right")
        right.plot(updates, [bits_per_byte(loss) for _, loss in self.tests], "o-", markersize=3)
        right.set(title="validation, bits per byte")
