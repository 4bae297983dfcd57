"""What would be silently wrong because each rank has a part of the model only, is right, told or refused."""

from __future__ import annotations

import gc
import random
import weakref
from collections import OrderedDict, namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.amp import edit_watch
from halfmesh.errors import IncompatibleConfigError, InputError
from tests.support.models import CLASSES, FEATURES, make_data, make_engine, make_loader, said, sgd
from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.distributed


def pipe(size: int = 2, microbatches: int = 2, **options: Any) -> dict[str, Any]:
    return {"parallel": {"pipeline": {"size": size, "microbatches": microbatches, **options}}}


def deep(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), *between, nn.Linear(16, 16), nn.Linear(16, CLASSES))


def make(model: nn.Module | None = None, config: Any = None, **options: Any) -> halfmesh.Engine:
    return make_engine(config or pipe(), model=deep() if model is None else model, **options)


def step(engine: halfmesh.Engine, x: Any, y: Any) -> float:
    engine.zero_grad()
    loss = engine.criterion(engine(x), y)
    engine.backward(loss)
    engine.step()
    return loss.item()


# -- errors that are caught ------------------------------------------------------------------------------------------


class Words(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(4, 8), nn.Flatten(), nn.Linear(16, CLASSES))


def goes_on(rank: int, world_size: int) -> str:
    """A loop that leaves out batches with errors; the second has a word that there is not."""
    engine = make(Words())
    y = torch.arange(4) % CLASSES
    for word in (1, 9, 2):
        try:
            step(engine, torch.full((4, 2), word), y)
        except IndexError:
            continue
    return "went on"


def test_a_batch_cannot_be_left_out_by_catching_its_error():
    with pytest.raises(RankFailure, match=r"left in the middle of a batch by an error \(IndexError"):
        run_ranks(goes_on, 2, timeout=60)


# -- random numbers --------------------------------------------------------------------------------------------------


class Jumps(nn.Module):
    """Draws of every kind."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.seen: list[tuple[float, float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = random.random(), float(np.random.rand())
        self.seen.append(drawn)
        return x + self.factor * (sum(drawn) + torch.rand_like(x))


def noisy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    random.random(), np.random.rand()
    return nn.functional.cross_entropy(output + 0.01 * torch.randn_like(output), target)


def draws(rank: int, world_size: int) -> dict[str, Any]:
    model = deep(Jumps(0.1))
    engine = make(model, pipe() | {"seed": 7}, criterion=noisy)
    x, y = make_data(8)
    engine.model.eval()
    model[2].train()  # as Monte Carlo dropout
    with torch.no_grad():
        engine(x)
    engine.train()
    model[2].seen.clear()
    for _ in range(3):
        step(engine, x, y)
    saved = engine.state_dict()["random"]["host"]
    outside = torch.rand(2).tolist(), random.random(), float(np.random.rand())
    return {"outside": outside, "seen": list(model[2].seen), "saved": saved is not None}


def test_what_a_stage_or_the_criterion_draws_does_not_part_the_ranks():
    first, second = run_ranks(draws, 2)
    assert first["outside"] == second["outside"]
    assert first["saved"]
    assert second["saved"]
    [seen] = [result["seen"] for result in (first, second) if len(set(result["seen"])) > 1]
    assert len(set(seen)) == len(seen) == 3 * 2  # each microbatch draws anew


def parts_later(rank: int, world_size: int) -> list[str]:
    """One rank's targets, then its inputs, become others: what is not compared at once is compared later."""
    found = []
    for what in ("targets", "inputs"):
        engine = make()
        x, y = make_data(8)
        words = "nothing"
        for number in range(1, 12):
            if rank == 1 and number > 3:
                x, y = (x, y.roll(1)) if what == "targets" else (x.roll(1, 0), y)
            try:
                step(engine, x, y)
            except InputError as error:
                words = f"{number}: {error}"
                break
        found.append(words)
    return found


def test_batches_that_part_later_are_noticed():
    for found in run_ranks(parts_later, 2):
        assert "10: the 2 ranks of a pipeline were given different targets" in found[0]
        assert "10: the 2 ranks of a pipeline were given different inputs" in found[1]


# -- losses and gradients --------------------------------------------------------------------------------------------


class KeepsTerm(nn.Module):
    """A layer with a loss term of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        self.term = x.square().mean()
        return x


def other_ways(rank: int, world_size: int) -> dict[str, str]:
    """Loss terms that do not come through the output; what works, works afterwards."""
    x, y = make_data(8)
    found = {}
    engine = make(deep(KeepsTerm()))
    found["kept"] = said(engine, x)
    engine.close()
    engine = make()
    leaf = x.clone().requires_grad_()
    found["input gradient"] = said(engine, leaf)
    handle = engine(x)
    found["handle"] = said(engine, handle)
    loss = engine.criterion(handle, y)
    engine.eval()
    found["mode"] = said(engine.backward, loss)
    engine.train()
    z, t = x.clone(), y.clone()
    loss = engine.criterion(engine(z), t)
    z.zero_()
    found["input changed"] = said(engine.backward, loss)
    loss = engine.criterion(engine(x), t)
    t.zero_()
    found["target changed"] = said(engine.backward, loss)
    found["boxes"] = said(engine.criterion, engine(x), [torch.ones(i % 3, 4) for i in range(8)])
    found["nested"] = said(engine.criterion, engine(x), {"t": [[i] for i in range(8)]})
    engine.model.register_forward_hook(lambda *_: None)
    found["hook"] = said(engine, x)
    return found


PITFALLS = {
    "kept": "2.term is kept on the model with its graph",
    "input gradient": "an input of engine(...) requires gradients",
    "handle": "the output of engine(...) is not computed before",
    "mode": "the model was changed (engine.eval(), engine.train(), an attribute) between engine(...) and",
    "input changed": "an input or a target was changed in place between engine(...) and engine.backward(loss)",
    "target changed": "an input or a target was changed in place between engine(...) and engine.backward(loss)",
    "boxes": "target has 8 items, as many as the batch has rows, but is no tensor",
    "nested": "target has 8 items, as many as the batch has rows, but is no tensor",
    "hook": "the model itself: hooks were registered on it",
}


def test_what_other_stages_would_not_know_is_refused():
    first, second = run_ranks(other_ways, 2, timeout=60)
    for name, words in PITFALLS.items():
        assert words in first[name], name
        assert words in second[name], name


def penalty(rank: int, world_size: int) -> None:
    model = deep()

    def criterion(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) + sum(p.square().sum() for p in model.parameters())

    step(make(model, criterion=criterion), *make_data(8))


def test_a_penalty_on_the_weights_of_one_stage_is_refused():
    with pytest.raises(
        RankFailure, match="the criterion's loss depends on the model otherwise than through its output"
    ):
        run_ranks(penalty, 2, timeout=60)


def clips(rank: int, world_size: int) -> list[str]:
    """torch's own clipping, of each stage by itself."""
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        tell = SimpleNamespace(warning=lambda text, *args: told.append(text % args))
        patch.setattr(edit_watch, "_log", tell)
        for world in ({}, {"data": {"bucket_mb": 1e-4}}):
            config = pipe()
            config["parallel"] |= world
            engine = make(config=config)
            x, y = make_data(8)
            step(engine, x, y)
            engine.backward(engine.criterion(engine(x), y))
            nn.utils.clip_grad_norm_(engine.model.parameters(), 1e-3)
            engine.step()
            engine.close()
    return told


def test_clipping_of_a_part_is_told():
    for told in run_ranks(clips, 4):
        assert len(told) == 2
        assert "of which each rank has only its part of the model's" in told[0]
        assert "engine.clip_grad_norm_(max_norm)" in told[1]


def test_optimizers_that_join_all_parameters_are_refused(monkeypatch):
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")

    class Lamb(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.param_groups[0]["max_grad_norm"] = 1.0

    with pytest.raises(IncompatibleConfigError, match=r"Lamb has max_grad_norm=1.0, which it applies to all"):
        make(optimizer=Lamb)
    with pytest.raises(IncompatibleConfigError, match="SyncBatchNorm joins all ranks"):
        make(deep(nn.SyncBatchNorm(16)))


# -- what a stage reads ----------------------------------------------------------------------------------------------


class Annealed(nn.Module):
    """Reads numbers that the user changes on the way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, 16)
        self.last = nn.Linear(16, CLASSES)
        self.alpha = 1.0
        self.doubles = False

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.first(x) * self.alpha * scale
        return self.last(x + x if self.doubles else x)


def anneals(rank: int, world_size: int) -> dict[str, Any]:
    model = Annealed()
    engine = make(model, pipe(partition=("last",)))
    x, y = make_data(8)
    losses = []
    for number in range(6):
        model.alpha, model.doubles = 1 + number, number > 3
        engine.zero_grad()
        loss = engine.criterion(engine(x, scale=1 + number / 10), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses}


def test_numbers_on_a_traced_model_are_read_anew():
    model, (x, y) = Annealed(), make_data(8)
    optimizer, expected = sgd(model.parameters()), []
    for number in range(6):
        model.alpha, model.doubles = 1 + number, number > 3
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, scale=1 + number / 10), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for result in run_ranks(anneals, 2):
        assert result["losses"] == pytest.approx(expected, rel=1e-5)


class Counts(Annealed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.alpha += 1
        return super().forward(x)


class Lucky(Annealed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2 if random.random() < 0.5 else x)


class Tau(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"x": x, "tau": 0.5}


def test_what_a_trace_would_keep_is_refused():
    from halfmesh.parallel.pipeline.partition import resolve

    for model, words in ((Counts(), "changes numbers or flags on the model"), (Lucky(), "draws random numbers")):
        _, [problem] = resolve(model, 2, 1, ("last",))
        assert words in problem
    from halfmesh.parallel.pipeline.skeleton import _refuse_numbers

    with pytest.raises(InputError, match=r"a stage returns the number 0.5, which the next one would get once and"):
        _refuse_numbers(Tau()(torch.ones(1)))


# -- memory, containers and short batches ----------------------------------------------------------------------------

Pair = namedtuple("Pair", "output target")


def pair_loss(pair: Any) -> torch.Tensor:
    output, target = pair if isinstance(pair, tuple) else pair.values()
    return nn.functional.cross_entropy(output, target)


def contained(rank: int, world_size: int) -> list[Any]:
    engine = make(criterion=pair_loss)
    x, y = make_data(8)
    losses = []
    for wrap in (Pair, lambda o, t: OrderedDict(o=o, t=t), lambda o, t: (o, t)):
        target = y.clone()
        gone = weakref.ref(target)
        loss = engine.criterion(wrap(engine(x), target))
        engine.backward(loss)
        engine.step()
        del target
        losses.append((loss, gone))
    engine(x)  # the engine keeps one batch, the last one; who keeps the loss of another keeps nothing of its batch
    gc.collect()
    return [(loss.item(), gone() is None) for loss, gone in losses]


def test_handles_within_containers_and_losses_that_are_kept():
    first, second = run_ranks(contained, 2)
    assert first == second
    assert all(freed for _, freed in first)


def short_batches(rank: int, world_size: int) -> dict[str, Any]:
    """5 samples are left, of which BatchNorm needs two at a time."""
    found: dict[str, Any] = {}
    for schedule in ("gpipe", "1f1b"):
        engine = make(deep(nn.BatchNorm1d(16)), pipe(schedule=schedule), loader=make_loader(13, 8))
        found[schedule] = [said(step, engine, *batch) for batch in engine.dataloader]
        engine.close()
    return found


def test_batch_norm_gets_two_samples_or_a_message():
    for found in run_ranks(short_batches, 2):
        assert found["gpipe"] == ["nothing", "nothing"]
        assert found["1f1b"][0] == "nothing"
        assert "5 samples cannot be split" in found["1f1b"][1]
        assert "2 samples or more in each, which BatchNorm needs" in found["1f1b"][1]


def many_shapes(rank: int, world_size: int) -> tuple[int, int]:
    from halfmesh.parallel.pipeline import runner

    engine = make()
    x, y = make_data(48)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "MOST_SHAPES", 3)
        patch.setattr(runner, "MOST_CROSSINGS", 4)
        for rows in (2, 4, 6, 8, 10, 12, 2, 14):
            step(engine, x[:rows], y[:rows])
    pipeline = engine._passes._pipeline
    return len(pipeline._schedules), len(pipeline._crossings)


def test_few_shapes_are_kept():
    assert run_ranks(many_shapes, 2) == [(3, 4), (3, 4)]
