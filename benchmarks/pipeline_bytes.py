"""What two stages send each other in a step, and the memory that they receive into; with batches of several lengths.

python -m benchmarks.pipeline_bytes
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import halfmesh

from .counts import tensor_bytes
from .layouts import on_ranks

WIDTH, MICROBATCHES, ROWS = 64, 8, 16
LENGTHS = (32, 48, 64, 80, 96, 112, 128, 144)
"""Of the sequences of a batch, one after the other: 8 shapes."""
MODES = {"fp32": {}, "TORCH bf16": {"bf16": {"mode": "torch"}}, "NAIVE bf16": {"bf16": {"mode": "naive"}}}


class Wire:
    """Counts what is sent, and keeps an eye on the memory that was received into."""

    def __init__(self) -> None:
        self.sent = self.most = 0
        self._received: dict[StorageWeakRef, int] = {}
        outer = self

        class Recorded(dist.P2POp):
            def __init__(self, op: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> None:
                super().__init__(op, tensor, *args, **options)
                outer.note(op is dist.isend, tensor)

        self.recording = mock.patch.object(dist, "P2POp", Recorded)

    def note(self, sends: bool, tensor: torch.Tensor) -> None:
        if sends:
            self.sent += tensor_bytes(tensor)
            return
        storage = tensor.untyped_storage()
        self._received[StorageWeakRef(storage)] = storage.nbytes()
        self.most = max(self.most, self.held())

    def held(self) -> int:
        """Bytes of what was received into and is still there."""
        self._received = {ref: size for ref, size in self._received.items() if not ref.expired()}
        return sum(self._received.values())


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True) for _ in range(4))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, WIDTH))


def measure(mode: str) -> list[Any]:
    """Of each rank, in a step of the shortest batch: bytes sent, and bytes received into at most at one time; then
    after all lengths: bytes still there."""
    options = {"size": 2, "microbatches": MICROBATCHES}
    config = {"parallel": {"pipeline": options}} | MODES[mode]
    model = make_model()
    engine = halfmesh.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.01), nn.functional.mse_loss, config=config, device="cpu"
    )

    def step(length: int) -> None:
        x = torch.randn(ROWS, length, WIDTH, generator=torch.Generator().manual_seed(length))
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), x))
        engine.step()

    wire = Wire()
    with wire.recording:
        step(LENGTHS[0])
        wire.sent = wire.most = 0
        step(LENGTHS[0])
        sent, most = wire.sent, wire.most
        for length in LENGTHS:
            step(length)
        held = wire.held()
    engine.close()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [sent, most, held])
    return everyone


def main() -> None:
    print("| mode | rank | sent in a step, KiB | received into in that step, KiB | kept after 8 lengths, KiB |")
    print("|---|---|---|---|---|")
    for mode in MODES:
        for rank, found in enumerate(on_ranks(measure, mode)):
            sizes = " | ".join(f"{size / 1024:.0f}" for size in found)
            print(f"| {mode} | {rank} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
