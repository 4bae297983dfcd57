"""Messages between stages that come as late as they may: a buffer is read after its `wait`, and kept until then."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from tests.support.models import MODES, adamw
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.versions import SPLIT_SCHEDULES

pytestmark = [pytest.mark.distributed, pytest.mark.sends]

SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2} | dict.fromkeys(SPLIT_SCHEDULES, 2)
"""Stages per rank."""


class Late:
    """A message in flight: what is received is nan until `wait`, and what is sent may not change until then."""

    def __init__(self, tensor: torch.Tensor, arriving: torch.Tensor | None, work: dist.Work) -> None:
        self._tensor, self._arriving, self._work = tensor.detach(), arriving, work
        if arriving is not None:
            self._tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
        self._held: torch.Tensor | None = self._tensor.clone()

    def wait(self) -> None:
        self._work.wait()
        if self._held is None:
            return
        torch.testing.assert_close(self._tensor, self._held, rtol=0, atol=0, equal_nan=True)
        self._held = None
        if self._arriving is not None:
            self._tensor.copy_(self._arriving)


@contextmanager
def late_messages():
    """A scope in which they are; yields a list of those that were received."""
    send, recv, received = dist.ProcessGroup.send, dist.ProcessGroup.recv, []

    def send_late(group, tensors, *to):
        return Late(tensors[0], None, send(group, tensors, *to))

    def receive_late(group, tensors, *source):
        if tensors[0].numel() == 1:  # by which torch connects the ranks; it receives several into one tensor
            return recv(group, tensors, *source)
        arriving = torch.empty_like(tensors[0])
        received.append(arriving)
        return Late(tensors[0], arriving, recv(group, [arriving], *source))

    with (
        mock.patch.object(dist.ProcessGroup, "send", send_late),
        mock.patch.object(dist.ProcessGroup, "recv", receive_late),
    ):
        yield received


def train(mode, schedule):
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    pipeline = {"size": 2, "microbatches": 4, "schedule": schedule, "chunks": SCHEDULES[schedule]}
    config = MODES[mode] | {"clip_grad_norm": 0.5, "parallel": {"pipeline": pipeline}}
    engine = halfmesh.initialize(
        nn.Sequential(*layers), adamw, nn.CrossEntropyLoss(), config=config, device=rank_device()
    )
    x, y = here((torch.randn(8, 8), torch.arange(8)))
    losses = []
    for _ in range(3):
        engine.zero_grad()
        loss = engine.criterion(engine(x), y)
        engine.backward(loss)
        losses.append((float(loss), engine.step().grad_norm))
    weights = {name: value.clone() for name, value in engine.model.state_dict().items()}
    engine.close()
    return losses, weights


def early_and_late(rank, world_size, mode):
    """By schedule: the results of both, and how many messages came late."""
    found = {}
    for schedule in SCHEDULES:
        expected = train(mode, schedule)
        with late_messages() as received:
            found[schedule] = expected, train(mode, schedule), len(received)
    return found


@pytest.mark.parametrize("mode", ["none", "torch_bf16", "naive_bf16"])
def test_every_schedule_waits_for_what_it_receives(mode):
    for found in run_ranks(early_and_late, 2, mode):
        for schedule, ((losses, weights), (late_losses, late_weights), received) in found.items():
            assert received > 0, schedule
            assert late_losses == losses, schedule
            assert all(torch.equal(value, weights[name]) for name, value in late_weights.items()), schedule
