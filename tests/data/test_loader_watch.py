"""A loop that waits for its data is told so, once; one that does not is not."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from halfmesh.engine.dataloader import EngineDataLoader
from halfmesh.engine.loader_watch import SHARE, WINDOW_BATCHES, WINDOW_S, LoaderWatch

CPU = torch.device("cpu")
LOADER = DataLoader(TensorDataset(torch.zeros(4, 1)), num_workers=0)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def run(fetch_s: float, train_s: float, batches: int, watch=None, clock=None):
    clock = clock or Clock()
    watch = watch or LoaderWatch(LOADER, CPU, clock)

    def load():
        for number in range(batches):
            clock.now += fetch_s
            yield number

    seen = []
    for batch in watch.watch(load()):
        seen.append(batch)
        clock.now += train_s
    assert seen == list(range(batches))
    return watch, clock


@pytest.mark.parametrize(
    ("fetch_s", "train_s", "batches", "warns"),
    [
        (0.5, 0.5, 40, True),
        (0.31, 0.69, 40, True),
        (0.28, 0.72, 40, False),
        (0.0, 1.0, 40, False),
        (0.5, 0.5, WINDOW_BATCHES - 1, False),
        (5.0, 5.0, 3, False),
        (0.01, 0.01, 400, False),
    ],
    ids=["half", "above", "below", "none", "few", "few_but_long", "short"],
)
def test_when_it_warns(fetch_s, train_s, batches, warns, caplog):
    with caplog.at_level(logging.WARNING, "halfmesh"):
        run(fetch_s, train_s, batches)
    assert bool(caplog.messages) == warns


def test_what_it_says_once(caplog):
    with caplog.at_level(logging.WARNING, "halfmesh"):
        watch, clock = run(0.6, 0.4, 60)
        run(0.6, 0.4, 60, watch, clock)
    (text,) = caplog.messages
    assert "waited for engine.dataloader 61 % of its time (12.0 of 19.6 s, 20 batches)" in text
    assert "give the DataLoader more workers (num_workers=0; this machine has " in text


def test_a_slow_start_is_forgotten(caplog):
    """Workers take long for their first batch."""
    clock = Clock()
    watch = LoaderWatch(LOADER, CPU, clock)
    with caplog.at_level(logging.WARNING, "halfmesh"):
        run(0.0, 1.0, 100, watch, clock)
        for _ in watch.watch(iter([0])):
            clock.now += 50
    assert caplog.messages == []


def test_short_epochs_are_taken_together(caplog):
    clock = Clock()
    watch = LoaderWatch(LOADER, CPU, clock)
    with caplog.at_level(logging.WARNING, "halfmesh"):
        for _ in range(10):
            run(0.6, 0.4, 4, watch, clock)
            clock.now += 100  # an evaluation
    assert len(caplog.messages) == 1


def test_the_training_loader_is_watched_and_the_other_is_not(monkeypatch, caplog):
    """With real time, and short windows."""
    from halfmesh.engine import loader_watch

    monkeypatch.setattr(loader_watch, "WINDOW_S", 0.0)
    monkeypatch.setattr(loader_watch, "WINDOW_BATCHES", 3)
    with caplog.at_level(logging.WARNING, "halfmesh"):
        list(EngineDataLoader(LOADER, CPU))
        assert caplog.messages == []
        list(EngineDataLoader(LOADER, CPU, on_epoch_end=lambda: None))  # a loop that does nothing but wait
    assert len(caplog.messages) == 1
    assert WINDOW_S >= 1
    assert SHARE < 1
