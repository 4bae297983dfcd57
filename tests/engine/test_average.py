"""engine.averaged_model: the average of the fp32 weights, in every layout and mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.models import MODES, adamw, full_weights, make_data, make_engine, said, step_on
from tests.support.ranks import here, run_ranks

X, Y = make_data(16)
DECAY, STEPS, UNTIL = 0.9, 5, 3


def make_model(seed=0):
    torch.manual_seed(seed)
    first, last = nn.Linear(8, 12), nn.Linear(12, 4)
    last.weight.requires_grad_(False)
    last.register_buffer("kept", torch.ones(2), persistent=False)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(12, 12), nn.BatchNorm1d(12), last)


def start(config=None, seed=0, **options):
    return make_engine(config, model=make_model(seed), optimizer=adamw, **options)


def whole(engine):
    return {name: value.float() for name, value in engine.full_state_dict(rank0_only=False).items()}


def advance(engine, steps, first=0):
    """Returns the whole weights after each update."""
    context, found = engine.context, []
    for step in range(first, first + steps):
        x, y = (full.roll(step, 0).chunk(context.dp_size)[context.dp_rank] for full in (X, Y))
        engine.zero_grad()
        step_on(engine, x, y)
        found.append(whole(engine))
    return found


def by_hand(weights, every, buffers):
    """The average of the whole weights before training and after each update; buffers that have none are the last."""
    average = dict(weights[0])
    for step, now in enumerate(weights[1:], 1):
        for name, value in now.items():
            if "tracked" in name or ("running" in name and not buffers):
                average[name] = value
            elif step % every == 0:
                average[name] = DECAY * average[name] + (1 - DECAY) * value
    return average


def compare(found, expected, words=""):
    """Buffers are in half precision in the model of some modes."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        close = 1e-3 if "running" in name else 1e-6
        torch.testing.assert_close(found[name].float(), value.float(), rtol=close, atol=close, msg=f"{name} {words}")


def saved(average, path):
    average.save_weights(path, format="torch")
    return torch.load(path) if average._engine.context.rank == 0 else {}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


LAYOUTS = [
    ({"data": "zero1"}, "naive_fp16", 2, True),
    ({"tensor": {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}}, "none", 1, False),
    ({"pipeline": {"size": 2, "microbatches": 2}}, "naive_fp16", 2, True),
]


def train(rank, world_size, cells, folder):
    """By cell the average when it was saved. The model computes with it for a while, and both go on bit for bit. And
    what is said of an average that one rank alone has."""
    found = []
    for number, (parallel, mode, every, buffers) in enumerate(cells):
        case, config = folder / str(number), {**MODES[mode], "parallel": parallel, "profile_ranges": True}
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
            torch.testing.assert_close(inside.cpu().float(), plain(X).detach(), rtol=2e-3, atol=2e-3)
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
    engine = start({"parallel": {"data": "zero1"}})
    if rank == 0:
        engine.averaged_model(DECAY)
    advance(engine, 1)
    return found, said(engine.save, folder / "alone")


@pytest.mark.distributed
@pytest.mark.sends
def test_every_layout_averages_its_whole_weights(tmp_path):
    (found, words), (_, others) = run_ranks(train, 2, LAYOUTS, tmp_path)
    assert "engine.averaged_model was called on rank 0 only" in words == others
    for number, until in enumerate(found):
        one = start()  # loads what each layout has saved
        average = one.averaged_model(DECAY, every=LAYOUTS[number][2], buffers=LAYOUTS[number][3])
        one.load(tmp_path / str(number))
        compare(saved(average, tmp_path / "average.pt"), until, str(LAYOUTS[number]))


def test_a_skipped_update_leaves_it(tmp_path):
    engine = start(MODES["naive_fp16"])
    average = engine.averaged_model(0.5)
    step_on(engine, X, Y)
    before = saved(average, tmp_path / "before.pt")
    assert step_on(engine, X * torch.inf, Y).skipped
    assert torch.equal(saved(average, tmp_path / "after.pt")["0.weight"], before["0.weight"])
    assert not step_on(engine, X, Y).skipped
    assert not torch.equal(saved(average, tmp_path / "later.pt")["0.weight"], before["0.weight"])


def test_mistakes(tmp_path):
    engine = start()
    assert "decay=1.01 must be between 0 and 1: the part of the average" in said(engine.averaged_model, 1.01)
    average = engine.averaged_model(0.9)
    assert "an average already, with decay=0.9" in said(engine.averaged_model, 0.99)
    step_on(engine, X, Y)
    with average.applied():
        calls = dict.fromkeys(("save", "load", "load_weights"), (tmp_path,)) | {"state_dict": ()}
        for name, arguments in calls.items():
            words = f"engine.{name}() was called inside `with average.applied():`"
            assert words in said(getattr(engine, name), *arguments)
        assert "average.applied() was called inside" in said(average.applied().__enter__)


def test_loads_where_only_one_side_has_an_average(tmp_path, caplog):
    engine = start()
    advance(engine, 2)
    engine.save(tmp_path / "without")
    first = engine.averaged_model(DECAY)
    advance(engine, 3, first=2)
    engine.save(tmp_path / "with")
    expected = saved(first, tmp_path / "average.pt")

    caplog.set_level("INFO", "halfmesh")
    again = start(seed=1)
    average = again.averaged_model(DECAY)
    again.load(tmp_path / "without")
    assert "it has no average of the weights (engine.averaged_model): the average" in caplog.text
    assert equal(saved(average, tmp_path / "again.pt"), full_weights(again))
    again.load(tmp_path / "with")
    assert equal(saved(average, tmp_path / "again.pt"), expected)

    resumed = start({"resume": str(tmp_path / "with")}, seed=1)  # loads before anybody can ask for an average
    resumed.save(tmp_path / "saved on")
    assert equal(saved(resumed.averaged_model(DECAY), tmp_path / "resumed.pt"), expected)
    ignored = start({"resume": str(tmp_path / "saved on")}, seed=1)
    advance(ignored, 2)
    assert caplog.text.count("has an average of the weights that this run has not resumed") == 1
