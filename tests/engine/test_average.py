"""engine.averaged_model: the average of the fp32 weights, in every layout and mode."""

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
from tests.support.models import MODES, adamw, full_weights, make_data, make_engine, said, step_on
from tests.support.ranks import here, run_ranks
from tests.support.updates import CountReads

X, Y = make_data(16)
DECAY, STEPS, UNTIL = 0.9, 5, 3


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    first, last = nn.Linear(8, 12), nn.Linear(12, 4)
    last.weight.requires_grad_(False)
    last.register_buffer("kept", torch.ones(2), persistent=False)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(12, 12), nn.BatchNorm1d(12), last)


def start(config: dict[str, Any] | None = None, seed: int = 0, **options: Any) -> Any:
    return make_engine(config, model=make_model(seed), optimizer=adamw, **options)


def whole(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.float() for name, value in engine.full_state_dict(rank0_only=False).items()}


def advance(engine: Any, steps: int, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """All ranks take the samples of one process, each its part. Returns the whole weights after each update."""
    context, found = engine.context, []
    for step in range(first, first + steps):
        x, y = (full.roll(step, 0).chunk(context.dp_size)[context.dp_rank] for full in (X, Y))
        engine.zero_grad()
        step_on(engine, x, y)
        found.append(whole(engine))
    return found


def by_hand(weights: list[dict[str, torch.Tensor]], every: int, buffers: bool) -> dict[str, torch.Tensor]:
    """The average of the whole weights before training and after each update; buffers that have none are the last."""
    average = dict(weights[0])
    for step, now in enumerate(weights[1:], 1):
        for name, value in now.items():
            if "tracked" in name or ("running" in name and not buffers):
                average[name] = value
            elif step % every == 0:
                average[name] = DECAY * average[name] + (1 - DECAY) * value
    return average


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], words: str = "") -> None:
    """Buffers are in half precision in the model of some modes."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        close = 1e-3 if "running" in name else 1e-6
        torch.testing.assert_close(found[name].float(), value.float(), rtol=close, atol=close, msg=f"{name} {words}")


def saved(average: Any, path: Path) -> dict[str, torch.Tensor]:
    average.save_weights(path, format="torch")
    return torch.load(path) if average._engine.context.rank == 0 else {}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- what it is -------------------------------------------------------------------------------------------------------

ALONE: list[tuple[dict[str, Any], str, Any, bool]] = [
    ({}, "none", 1, False),
    ({}, "torch_fp16", 1, True),
    ({}, "naive_fp16", 3, True),
    ({}, "naive_bf16", np.int64(2), False),
]
LAYOUTS: list[tuple[dict[str, Any], str, Any, bool]] = [
    ({"data": "zero1"}, "naive_fp16", 2, True),
    ({"data": "fsdp"}, "none", 1, False),
    ({"data": "fsdp"}, "naive_fp16", 2, True),
    ({"tensor": {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}}, "none", 2, True),
    ({"pipeline": {"size": 2, "microbatches": 2}}, "naive_fp16", 2, True),
]


def train(rank: int, world_size: int, cells: list[Any], folder: Path) -> list[dict[str, torch.Tensor]]:
    """By cell the average when it was saved. The model computes with it for a while, and both go on bit for bit."""
    found = []
    for number, (parallel, mode, every, buffers) in enumerate(cells):
        case, config = folder / str(number), {**MODES[mode], "parallel": parallel}
        engine = start(config)
        average = engine.averaged_model(DECAY, every=every, buffers=buffers)
        weights = [whole(engine), *advance(engine, UNTIL)]
        engine.save(case)
        held = {name: value.clone() for name, value in engine.model.state_dict().items()}
        with torch.no_grad(), average.applied():
            inside = engine.eval()(here(X))
            engine.train()
        assert equal(engine.model.state_dict(), held), case
        found.append(saved(average, case / "until.pt"))
        if rank == 0 and "pipeline" not in parallel:
            plain = make_model().eval()
            plain.load_state_dict(found[-1])
            close = 2e-2 if "bf16" in mode else 2e-3
            torch.testing.assert_close(inside.cpu().float(), plain(X).detach(), rtol=close, atol=close)
        weights += advance(engine, STEPS - UNTIL, first=UNTIL)
        end = saved(average, case / "average.pt")
        if rank == 0:
            compare(end, by_hand(weights, every, buffers), str(cells[number]))
        engine.close()
        again = start(config, seed=1)
        resumed = again.averaged_model(DECAY, every=every, buffers=buffers)
        again.load(case)
        advance(again, STEPS - UNTIL, first=UNTIL)
        assert equal(saved(resumed, case / "resumed.pt"), end), case
        again.close()
    return found


def test_it_follows_the_masters_in_one_process(tmp_path):
    """And not weights in half precision; after every few updates, and with buffers or without."""
    train(0, 1, ALONE, tmp_path)


@pytest.mark.distributed
@pytest.mark.sends
def test_every_layout_averages_its_whole_weights(tmp_path):
    for number, until in enumerate(run_ranks(train, 2, LAYOUTS, tmp_path)[0]):
        one = start()  # loads what each layout has saved
        average = one.averaged_model(DECAY, every=LAYOUTS[number][2], buffers=LAYOUTS[number][3])
        one.load(tmp_path / str(number))
        compare(saved(average, tmp_path / "average.pt"), until, str(LAYOUTS[number]))


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


# -- in a loop --------------------------------------------------------------------------------------------------------


def test_a_skipped_update_leaves_it(tmp_path):
    engine = start(MODES["naive_fp16"])
    average = engine.averaged_model(0.5)
    step_on(engine, X, Y)
    before = saved(average, tmp_path / "before.pt")
    assert step_on(engine, X * torch.inf, Y).skipped
    assert torch.equal(saved(average, tmp_path / "after.pt")["0.weight"], before["0.weight"])
    assert not step_on(engine, X, Y).skipped
    assert not torch.equal(saved(average, tmp_path / "later.pt")["0.weight"], before["0.weight"])


@pytest.mark.parametrize("mode", ["none", "naive_fp16", "torch_bf16"])
def test_no_host_read(mode):
    engine = start(MODES[mode])
    engine.averaged_model(0.9)
    for _ in range(3):
        step_on(engine, X, Y)
    with CountReads() as counter:
        step_on(engine, X, Y)
    assert counter.reads == 0


def test_an_interrupt_on_the_way_in_restores_the_weights():
    """Ctrl-C between two tensors."""

    class Interrupting(dict):
        def __getitem__(self, key):
            if key == list(self)[3]:
                raise KeyboardInterrupt
            return super().__getitem__(key)

    engine = start(MODES["naive_fp16"])
    average = engine.averaged_model(DECAY)
    advance(engine, 3)
    weights = full_weights(engine)
    average._average.values = Interrupting(average._average.values)
    with pytest.raises(KeyboardInterrupt), average.applied():
        pass
    assert equal(full_weights(engine), weights)


def test_casts_of_the_other_weights_are_not_used():
    """O1 keeps casts of weights from a forward to its backward."""
    engine = start(MODES["apex_o1"])
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
    for decay in (np.float32(0.5), Fraction(1, 2)):
        average.decay = decay
        assert type(average.decay) is float
    step_on(engine, X, Y)
    engine.optimizer.add_param_group({"params": list(model[2].parameters())})
    step_on(engine, X, Y)
    first = full_weights(engine)["2.weight"]
    assert torch.equal(saved(average, tmp_path / "average.pt")["2.weight"], first)
    step_on(engine, X, Y)
    found = saved(average, tmp_path / "average.pt")["2.weight"]
    torch.testing.assert_close(found, (first + full_weights(engine)["2.weight"]) / 2, rtol=0, atol=1e-7)


def test_mistakes(tmp_path):
    engine = start()
    for decay in (1.01, -0.1, True, "0.9", float("nan")):
        assert "is the fraction of the average that each update keeps" in said(engine.averaged_model, decay), decay
    assert "every=0: expected a whole number, 1 or more" in said(engine.averaged_model, 0.9, every=0)
    average = engine.averaged_model(0.9)
    assert "an average already, with decay=0.9" in said(engine.averaged_model, 0.99)
    step_on(engine, X, Y)
    state, loss = engine.state_dict(), engine.criterion(engine(X), Y)
    with average.applied():
        for name, *arguments in (
            ("backward", loss),
            *((name, tmp_path) for name in ("save", "load", "load_weights")),
            ("state_dict",),
            ("load_state_dict", state),
            ("close",),
        ):
            words = f"engine.{name}() was called inside `with average.applied():`"
            assert words in said(getattr(engine, name), *arguments)
        with pytest.raises(InputError, match=r"average\.applied\(\) was called inside"), average.applied():
            pass
    engine.backward(engine.criterion(engine(X), Y))
    with average.applied():
        assert "engine.step() was called inside" in said(engine.step)
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
    expected, state = saved(first, tmp_path / "average.pt"), engine.state_dict()

    caplog.set_level("INFO", "halfmesh")
    again = start(seed=1)
    average = again.averaged_model(DECAY)
    for load, given, words in (
        (again.load, tmp_path / "without", "it has no average of the weights (engine.averaged_model): the average"),
        (again.load_weights, tmp_path / "weights.pt", "the average of the weights restarts from the weights in"),
        (again.load_state_dict, {key: part for key, part in state.items() if key != "average"}, ""),  # an older one's
    ):
        load(given)
        assert words in caplog.text
        assert equal(saved(average, tmp_path / "again.pt"), full_weights(again))
        again.load_state_dict(state)
        assert equal(saved(average, tmp_path / "again.pt"), expected)

    resumed = start({"resume": str(tmp_path / "with")}, seed=1)  # loads before anybody can ask for an average
    resumed.save(tmp_path / "saved on")
    assert equal(saved(resumed.averaged_model(DECAY), tmp_path / "resumed.pt"), expected)
    ignored = start({"resume": str(tmp_path / "saved on")}, seed=1)
    assert "has an average of the weights that this run has not resumed" not in caplog.text
    advance(ignored, 2)
    assert caplog.text.count("has an average of the weights that this run has not resumed") == 1
