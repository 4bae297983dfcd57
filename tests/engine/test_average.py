"""engine.averaged_model: the average of one process's fp32 weights, in every layout and mode."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh.errors import InputError
from tests.support.models import (
    BF16_NAIVE,
    BF16_TORCH,
    FP16_NAIVE,
    FP16_TORCH,
    adamw,
    full_weights,
    make_data,
    make_engine,
    said,
    step_on,
)
from tests.support.ranks import here, run_ranks
from tests.support.updates import CountReads

X, Y = make_data(16)
DECAY, STEPS, UNTIL = 0.9, 8, 5
MODES = {"none": {}, "torch_fp16": FP16_TORCH, "naive_fp16": FP16_NAIVE, "naive_bf16": BF16_NAIVE}
TOLERANCES = {"none": 1e-6, "torch_fp16": 2e-4, "naive_fp16": 4e-4, "naive_bf16": 4e-3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {},
    "zero1": {"data": "zero1"},
    "fsdp": {"data": "fsdp"},
    "tensor": {"tensor": {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}},
    "pipeline": {"pipeline": {"size": 2, "microbatches": 2}},
}


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    first, last = nn.Linear(8, 12), nn.Linear(12, 4)
    last.weight.requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(12, 12), nn.LayerNorm(12), last)


def start(config: dict[str, Any] | None = None, seed: int = 0, **options: Any) -> Any:
    return make_engine(config, model=make_model(seed), optimizer=adamw, **options)


def advance(engine: Any, steps: int, first: int = 0) -> None:
    """All ranks take the samples of one process, each its part."""
    size = len(X) // engine.context.dp_size
    own = slice(engine.context.dp_rank * size, (engine.context.dp_rank + 1) * size)
    for step in range(first, first + steps):
        engine.zero_grad()
        step_on(engine, X.roll(step, 0)[own], Y.roll(step, 0)[own])


def by_hand(steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Of a plain fp32 loop."""
    model = make_model()
    optimizer = adamw(model.parameters())
    average = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X.roll(step, 0)), Y.roll(step, 0)).backward()
        optimizer.step()
        for name, value in model.state_dict().items():
            average[name] = DECAY * average[name] + (1 - DECAY) * value
    return average


def saved(average: Any, path: Path) -> dict[str, torch.Tensor]:
    average.save_weights(path, format="torch")
    return torch.load(path) if average._engine.context.rank == 0 else {}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("averaged weights (`torch.optim.swa_utils`)")
@pytest.mark.parametrize("mode", MODES)
def test_it_follows_the_masters(mode, tmp_path):
    """Which a sum of half-precision weights would not: of steps of lr 1e-5 bf16 sees nothing."""
    engine = make_engine(MODES[mode], model=make_model(), optimizer=lambda p: torch.optim.SGD(p, lr=1e-5))
    average = engine.averaged_model(0.5)
    expected = full_weights(engine)
    for _ in range(3):
        step_on(engine, X, Y)
        for name, value in full_weights(engine).items():
            expected[name].lerp_(value, 0.5)
    found = saved(average, tmp_path / "average.pt")
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=2e-8)
    assert not torch.equal(found["0.weight"], full_weights(engine)["0.weight"])


def test_a_skipped_update_leaves_it(tmp_path):
    engine = start(FP16_NAIVE)
    average = engine.averaged_model(0.5)
    step_on(engine, X, Y)
    before = saved(average, tmp_path / "before.pt")
    assert step_on(engine, X * torch.inf, Y).skipped
    assert equal(saved(average, tmp_path / "after.pt"), before)
    assert not step_on(engine, X, Y).skipped
    assert not equal(saved(average, tmp_path / "later.pt"), before)


@pytest.mark.parametrize("config", [{}, FP16_NAIVE, BF16_TORCH])
def test_no_host_read(config):
    engine = start(config)
    engine.averaged_model(0.9)
    for _ in range(3):
        step_on(engine, X, Y)
    with CountReads() as counter:
        step_on(engine, X, Y)
    assert counter.reads == 0


@pytest.mark.parametrize("mode", ["none", "naive_fp16"])
def test_the_model_computes_with_it_for_a_while(mode, tmp_path):
    engine = start(MODES[mode])
    average = engine.averaged_model(DECAY)
    advance(engine, STEPS)
    weights = {name: value.clone() for name, value in full_weights(engine).items()}
    with torch.no_grad(), average.applied():
        inside = engine(X)
        assert not torch.equal(engine.model[0].weight, weights["0.weight"].to(engine.model[0].weight.dtype))
    assert equal(full_weights(engine), weights)
    plain = make_model()
    plain.load_state_dict(saved(average, tmp_path / "average.pt"))
    torch.testing.assert_close(inside, plain(X).detach(), rtol=2e-3, atol=2e-3)
    engine.close()
    assert equal(engine.model.state_dict(), weights)


@pytest.mark.parametrize("after", range(1, 9))
def test_an_interrupt_on_the_way_in_restores_the_weights(after):
    """Ctrl-C between two tensors."""

    class Interrupting(dict):
        reads = 0

        def __getitem__(self, key):
            self.reads += 1
            if self.reads == after:
                raise KeyboardInterrupt
            return super().__getitem__(key)

    engine = start(FP16_NAIVE)
    average = engine.averaged_model(DECAY)
    advance(engine, 3)
    weights = {name: value.clone() for name, value in full_weights(engine).items()}
    average._average.values = Interrupting(average._average.values)
    with pytest.raises(KeyboardInterrupt), average.applied():
        pass
    assert equal(full_weights(engine), weights)
    advance(engine, 1)


def test_casts_of_the_other_weights_are_not_used():
    """O1 keeps casts of weights from a forward to its backward."""
    engine = start({"fp16": {"mode": "apex", "opt_level": "O1", "max_loss_scale": 256.0}})
    average = engine.averaged_model(DECAY)
    advance(engine, STEPS)
    own = engine(X)
    with average.applied():
        averaged = engine(X)
        assert not torch.equal(averaged, own)
    assert torch.equal(engine(X), own)


def test_parameters_that_come_later_and_settings(tmp_path):
    model = make_model()
    engine = make_engine({}, model=model, optimizer=lambda _: torch.optim.SGD(model[0].parameters(), lr=0.1))
    average = engine.averaged_model(0)
    assert average.decay == 0
    for decay in (np.float32(0.5), np.float64(0.5), Fraction(1, 2)):
        average.decay = decay
        assert type(average.decay) is float
    step_on(engine, X, Y)
    engine.optimizer.add_param_group({"params": list(model[2].parameters())})
    weights, averages = [], []
    for _ in range(2):
        step_on(engine, X, Y)
        weights.append(full_weights(engine)["2.weight"])
        averages.append(saved(average, tmp_path / "average.pt")["2.weight"])
    assert torch.equal(averages[0], weights[0])
    torch.testing.assert_close(averages[1], (weights[0] + weights[1]) / 2, rtol=0, atol=1e-7)


def test_mistakes(tmp_path):
    engine = start()
    for decay in (1.01, -0.1, True, "0.9", float("nan")):
        assert "is not the share of the average that each update keeps" in said(engine.averaged_model, decay), decay
    average = engine.averaged_model(0.9)
    assert "averages its weights already, with decay=0.9" in said(engine.averaged_model, 0.99)
    step_on(engine, X, Y)
    state = engine.state_dict()
    loss = engine.criterion(engine(X), Y)
    calls = [
        ("backward", loss),
        ("save", tmp_path),
        ("load", tmp_path),
        ("state_dict",),
        ("load_state_dict", state),
        ("load_weights", tmp_path),
        ("close",),
    ]
    with average.applied():
        for name, *arguments in calls:
            assert f"engine.{name}() was called within `with average.applied():`" in said(
                getattr(engine, name), *arguments
            )
        with pytest.raises(InputError, match=r"average\.applied\(\) was called within"), average.applied():
            pass
    engine.backward(engine.criterion(engine(X), Y))
    with average.applied():
        assert "engine.step() was called within" in said(engine.step)
    engine.close()
    assert "this engine is closed" in said(average.save_weights, tmp_path / "average.pt")


# -- saved and loaded -------------------------------------------------------------------------------------------------


def test_loads_where_only_one_side_has_an_average(tmp_path, caplog):
    engine = start()
    advance(engine, 2)
    engine.save(tmp_path / "without")
    first = engine.averaged_model(DECAY)
    advance(engine, 3, first=2)
    engine.save(tmp_path / "with")
    engine.save_weights(tmp_path / "weights.pt", format="torch")
    expected = saved(first, tmp_path / "average.pt")

    caplog.set_level("INFO", "halfmesh")
    again = start(seed=1)
    average = again.averaged_model(DECAY)
    again.load(tmp_path / "without")
    assert (
        "it has no average of the weights (engine.averaged_model): the average restarts from these weights"
        in caplog.text
    )
    assert equal(saved(average, tmp_path / "again.pt"), full_weights(again))
    again.load(tmp_path / "with")
    assert equal(saved(average, tmp_path / "again.pt"), expected)
    advance(again, 1)
    again.load_weights(tmp_path / "weights.pt")
    assert "the average of the weights restarts from those of" in caplog.text
    assert equal(saved(average, tmp_path / "again.pt"), full_weights(engine))

    resumed = start({"resume": str(tmp_path / "with")}, seed=1)  # loads before anybody can ask for an average
    resumed.save(tmp_path / "saved on")
    assert equal(saved(resumed.averaged_model(DECAY), tmp_path / "resumed.pt"), expected)
    ignored = start({"resume": str(tmp_path / "saved on")}, seed=1)
    assert "has an average of the weights, which this run does not continue" not in caplog.text
    advance(ignored, 2)
    assert caplog.text.count("has an average of the weights, which this run does not continue") == 1


def test_state_dict(tmp_path):
    engine = start(FP16_NAIVE)
    average = engine.averaged_model(DECAY)
    advance(engine, 3)
    state = engine.state_dict()
    again = start(FP16_NAIVE, seed=1)
    other = again.averaged_model(DECAY)
    again.load_state_dict(state)
    assert equal(saved(other, tmp_path / "other.pt"), saved(average, tmp_path / "average.pt"))
    del state["average"]  # of an older version
    again.load_state_dict(state)
    assert equal(saved(other, tmp_path / "other.pt"), full_weights(again))


# -- every few updates, and with buffers ------------------------------------------------------------------------------


def make_normed(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4))
    model[3].register_buffer("kept", torch.ones(2), persistent=False)
    return model


def normed_by_hand(steps: int, every: int, buffers: bool, size: int = 16) -> dict[str, torch.Tensor]:
    """Of a plain fp32 loop, as torchvision's EMA, and BatchNorm's statistics as the mean of parts of this size."""
    model = make_normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    parts = [slice(start, start + size) for start in range(0, len(X), size)]
    for step in range(steps):
        optimizer.zero_grad()
        before = {name: value.clone() for name, value in model.named_buffers()}
        after = []
        for part in parts:
            model.load_state_dict(before, strict=False)
            x, y = X.roll(step, 0)[part], Y.roll(step, 0)[part]
            (nn.functional.cross_entropy(model(x), y) / len(parts)).backward()
            after.append({name: value.clone() for name, value in model.named_buffers()})
        joined = {name: torch.stack([some[name].double() for some in after]).mean(0) for name in before}
        model.load_state_dict(joined, strict=False)
        optimizer.step()
        for name, value in model.state_dict().items():
            is_averaged = value.is_floating_point() and (buffers or "running" not in name)
            if not is_averaged:
                average[name] = value.clone()
            elif (step + 1) % every == 0:
                average[name] = DECAY * average[name] + (1 - DECAY) * value
    return average


def start_normed(config: Any = None, seed: int = 0) -> Any:
    return make_engine(config, model=make_normed(seed), optimizer=lambda params: torch.optim.SGD(params, lr=0.1))


@pytest.mark.parametrize(("every", "buffers"), [(1, True), (3, True), (np.int64(3), False)])
@pytest.mark.parametrize("mode", ["none", "naive_fp16"])
def test_every_few_updates_and_buffers(mode, every, buffers, tmp_path):
    engine = start_normed(MODES[mode])
    average = engine.averaged_model(DECAY, every=every, buffers=buffers)
    advance(engine, STEPS)
    expected, tolerance = normed_by_hand(STEPS, every, buffers), 1e-6 if mode == "none" else 2e-3
    torch.testing.assert_close(
        saved(average, tmp_path / "average.pt"), expected, rtol=tolerance, atol=tolerance, check_dtype=False
    )
    weights = full_weights(engine)
    with torch.no_grad(), average.applied():
        running = engine.model[1].running_mean
        is_own = torch.equal(running, weights["1.running_mean"].to(running.dtype))
        assert is_own != buffers
    assert equal(full_weights(engine), weights)


def test_a_momentum_of_one_leaves_it(tmp_path):
    engine = start_normed()
    before = full_weights(engine)
    average = engine.averaged_model(np.float64(1.0), buffers=True)
    advance(engine, 3)
    found = saved(average, tmp_path / "average.pt")
    del before["1.num_batches_tracked"], found["1.num_batches_tracked"]
    assert equal(found, before)


def test_every_is_a_number():
    assert "every=0: expected a whole number, 1 or more" in said(lambda: start().averaged_model(0.9, every=0))


def buffers_in_layouts(rank: int, world_size: int, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The averages by layout; each was saved and resumed on the way, without and before a call."""
    found = {}
    for name in ("replicate", "zero1", "fsdp", "pipeline"):
        config = {"parallel": LAYOUTS[name]}
        engine = start_normed(config)
        engine.averaged_model(DECAY, every=3, buffers=True)
        advance(engine, UNTIL)
        engine.save(folder / name)
        engine.close()
        engine = start_normed({**config, "resume": str(folder / name)}, seed=1)
        average = engine.averaged_model(DECAY, every=3, buffers=True)
        advance(engine, STEPS - UNTIL, first=UNTIL)
        found[name] = saved(average, folder / f"{name}.pt")
        engine.close()
    return found


@pytest.mark.distributed
@pytest.mark.sends
def test_buffers_in_layouts(tmp_path):
    found, _ = run_ranks(buffers_in_layouts, 2, tmp_path)
    for layout, average in found.items():
        parts = 8  # of a rank, or a microbatch
        del average["1.num_batches_tracked"]
        expected = normed_by_hand(STEPS, 3, True, parts)
        del expected["1.num_batches_tracked"]
        if layout == "pipeline":  # whose microbatches follow each other
            continue
        torch.testing.assert_close(average, expected, rtol=1e-5, atol=1e-6, check_dtype=False, msg=layout)
    for layout in found:  # loads what it has saved, as at its end
        one = start_normed(seed=1)
        average = one.averaged_model(DECAY, every=3, buffers=True)
        one.load(tmp_path / layout)
        kept = saved(average, tmp_path / "one.pt")
        expected = normed_by_hand(UNTIL, 3, True, 8)["1.running_mean"]
        assert layout == "pipeline" or torch.allclose(kept["1.running_mean"], expected, atol=1e-6)
        assert not torch.equal(kept["1.running_mean"], full_weights(one)["1.running_mean"])


# -- layouts ----------------------------------------------------------------------------------------------------------


def in_layouts(rank: int, world_size: int, folder: Path) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """The averages by layout and mode. On the way: saved, resumed, put to use, and after an error."""
    found = {}
    for name, layout in LAYOUTS.items():
        for mode in ("none", "naive_fp16"):
            case, config = folder / f"{name}_{mode}", {**MODES[mode], "parallel": layout}
            engine = start(config)
            average = engine.averaged_model(DECAY)
            advance(engine, UNTIL)
            engine.save(case)
            weights = {name: value.clone() for name, value in engine.model.state_dict().items()}
            with torch.no_grad(), average.applied():
                engine.eval()
                engine(here(X))
                engine.train()
            assert equal(engine.model.state_dict(), weights), case
            advance(engine, STEPS - UNTIL, first=UNTIL)
            found[name, mode] = saved(average, case / "average.pt")
            engine.close()
            again = start(config, seed=1)
            resumed = again.averaged_model(DECAY)
            again.load(case)
            advance(again, STEPS - UNTIL, first=UNTIL)
            assert equal(saved(resumed, case / "resumed.pt"), found[name, mode]), case
            again.close()
    return found


@pytest.mark.promise(
    "averaged weights (`torch.optim.swa_utils`)",
    "`engine.averaged_model`: of the masters, in every layout, saved and resharded",
    of="PyTorch",
    page="precision.md",
)
@pytest.mark.distributed
@pytest.mark.sends
def test_every_layout_averages_as_one_process_and_goes_on_bit_for_bit(tmp_path):
    expected, until = by_hand(), by_hand(UNTIL)
    found, _ = run_ranks(in_layouts, 2, tmp_path, timeout=200)
    for (layout, mode), weights in found.items():
        tolerance = TOLERANCES[mode]
        torch.testing.assert_close(weights, expected, rtol=tolerance, atol=tolerance, msg=f"{layout}, {mode}")
        one = start()  # loads what each layout has saved
        average = one.averaged_model(DECAY)
        one.load(tmp_path / f"{layout}_{mode}")
        found_here = saved(average, tmp_path / "average.pt")
        torch.testing.assert_close(found_here, until, rtol=tolerance, atol=tolerance, msg=f"{layout}, {mode}")


def on_one_rank(rank: int, world_size: int, folder: Path) -> str:
    """Of one rank alone the average cannot be saved; and an error of one rank in its scope makes no other wait."""
    engine = start({"parallel": {"data": "zero1"}})
    average = engine.averaged_model(DECAY) if rank == 0 else None
    advance(engine, 2)
    words = said(engine.save, folder)
    average = average or engine.averaged_model(DECAY)
    weights = {name: value.clone() for name, value in engine.model.state_dict().items()}
    try:
        with average.applied():
            if rank == 1:
                raise ZeroDivisionError
            dist.barrier()
    except ZeroDivisionError:
        dist.barrier()
    assert equal(engine.model.state_dict(), weights)
    return words


@pytest.mark.distributed
def test_one_rank_alone(tmp_path):
    for words in run_ranks(on_one_rank, 2, tmp_path):
        assert "engine.averaged_model was called on rank 0 only" in words
