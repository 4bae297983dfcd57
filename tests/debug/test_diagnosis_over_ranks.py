"""The first inf or nan over all ranks: what one of them has is told by all, with its rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.checkpoint_runs import PIPE, TENSOR
from tests.support.models import make_data
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

DATA = {"dp2": {}, "zero1": {"data": "zero1"}, "fsdp": {"data": "fsdp"}}
TP = {"tensor": TENSOR}
PP = {"pipeline": PIPE}
INTERLEAVED = {
    "pipeline": {"size": 2, "microbatches": 2, "schedule": "interleaved", "chunks": 2}
    | {"partition": ("up", "norm", "again")}
}
RAISE = {"on_nonfinite": "raise"}
FP16 = {"fp16": {"mode": "naive", "initial_scale": 16.0}, **RAISE}


class Odd(nn.Module):
    """Goes wrong with the samples that are chosen, in forward or in backward, as `what` says."""

    def __init__(self, what=""):
        super().__init__()
        self.what = what

    def forward(self, x, chosen):
        fine = (~chosen).to(x.dtype)
        if self.what == "forward":
            return x / fine
        return x + (x * 0 + fine).sqrt() if self.what == "backward" else x


class Net(nn.Module):
    """With the names of the composition suite's MLP, for its tensor plan; `early` goes wrong for odd samples."""

    def __init__(self, early=""):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.early = Odd(early)
        self.norm, self.again, self.head = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, given):
        x = self.early(self.first(given), given[:, 7:] == 1)
        return self.head(self.again(self.norm(x + self.down(self.up(x).relu()))))


class Row(nn.Sequential):
    """For pipelines: a row of modules. The last input feature is handed on as it is."""

    def __init__(self, early="", late=""):
        torch.manual_seed(0)
        parts = [
            Keeps(Linear()),
            Keeps(Odd(early)),
            Keeps(Linear()),
            Keeps(Linear()),
            Keeps(Odd(late)),
            Keeps(Linear()),
        ]
        super().__init__(*parts)


class Linear(nn.Linear):
    def __init__(self):
        super().__init__(7, 7)

    def forward(self, x, chosen):
        return super().forward(x)


class Keeps(nn.Module):
    """`inner` on all features but the last one, which says whether the sample is an odd one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.cat([self.inner(x[:, :7], x[:, 7:] == 1), x[:, 7:]], 1)


ROW_PIPE = {"pipeline": {"size": 2, "microbatches": 2, "partition": ["3"]}}
ROW_INTERLEAVED = {
    "pipeline": {"size": 2, "microbatches": 2, "partition": ["1", "3", "5"], "schedule": "interleaved", "chunks": 2}
}


def batch(odd=(), samples=4):
    """Samples, of which `odd` are odd ones."""
    x, y = make_data(samples)
    x[:, 0] = x[:, 7] = 0
    x[list(odd), 7] = 1
    return x, y


def criterion(output, y):
    return nn.functional.cross_entropy(output[:, :4].float(), y)


def fail(config, model, x, y, spoil=None, loss=criterion):
    """The error's words and the fault's, after one good step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = halfmesh.initialize(model, optimizer, loss, config=config, device="cpu")
    good_x, good_y = batch()
    for step in range(2):
        if step and spoil is not None:
            with torch.no_grad():
                spoil(engine)
        engine.zero_grad()
        now = (x, y) if step else (good_x, good_y)
        engine.backward(engine.criterion(engine(now[0]), now[1]))
        if step == 0:
            engine.step()
            continue
        with pytest.raises(halfmesh.NonFiniteError) as caught:
            engine.step()
    error = caught.value
    fault = error.diagnosis.fault
    engine.close()
    words = None if fault is None else (fault.kind, fault.name, fault.around, fault.ranks)
    return words, str(error.diagnosis)


def same(results):
    """What all ranks say."""
    first, *others = results
    assert all(other == first for other in others), results
    return first


# -- data ranks ------------------------------------------------------------------------------------------------------


def of_one_data_rank(rank, world_size, layout):
    """The fault is in rank 1's batch, or in what its model does with it."""
    found = {}
    for name, config in (("fp32", RAISE), ("fp16", FP16)):
        config = {**config, "parallel": DATA[layout]}
        x, y = batch([2] if rank == 1 else [])
        for what in ("forward", "backward"):
            found[name, what] = fail(config, Row(late=what), x, y)
        bad = x.clone()
        bad[0, 0] = float("inf") if rank == 1 else 0.0
        found[name, "input"] = fail(config, Row(), bad, y)
        found[name, "loss"] = fail(config, Row(), x, y + 9 * (rank == 1) - y * (rank == 1), loss=bad_criterion9)
    return found


def bad_criterion9(output, y):
    """Of class 9 there is none."""
    bad = (y == 9).any()
    return criterion(output, y.clamp(max=3)) + (output.sum() / 0 if bad else 0)


@pytest.mark.parametrize("layout", DATA)
def test_a_fault_of_one_data_rank(layout):
    found = same(run_ranks(of_one_data_rank, 2, layout, timeout=120))
    for name in ("fp32", "fp16"):
        words, text = found[name, "forward"]
        assert words == ("output", "4.inner", (), (1,)), text
        assert text.count(", on rank 1") == 1
        words, text = found[name, "backward"]
        assert words[0] == "gradient", text
        assert words[2:] == (("'4.inner' (Odd)",), (1,)), text
        assert found[name, "input"][0] == ("input", "input", (), (1,))
        assert found[name, "loss"][0][0] == "loss"
        assert found[name, "loss"][0][3] == (1,)


def sharded_weight(rank, world_size, value, config):
    """Under fsdp one rank holds the part that is `value`."""

    def spoil(engine):
        part = next(p for n, p in engine.model.named_parameters() if n == "2.inner.weight").to_local()
        if rank == 1:
            part[-1, -1] = value

    x, y = batch()
    return fail({**config, "parallel": DATA["fsdp"]}, Row(), x, y, spoil)


def test_a_weight_of_which_one_rank_has_the_part():
    words, text = same(run_ranks(sharded_weight, 2, float("nan"), RAISE, timeout=60))
    assert words == ("weight", "2.inner.weight", (), (1,))
    assert "before the forward: 1 nan of " in text


def test_a_part_in_fp32_that_fp16_does_not_have():
    """Parts are the masters: gathered in fp16 it is inf."""
    words, text = same(run_ranks(sharded_weight, 2, 1e6, FP16, timeout=60))
    assert words == ("weight", "2.inner.weight", (), (1,))
    assert "before the forward: it reaches 1e+06, and float16 ends at 65504, on rank 1" in text
    assert "float16 has no such number: use bf16" in text


# -- a tensor group --------------------------------------------------------------------------------------------------


def of_a_tensor_group(rank, world_size):
    config = {**RAISE, "parallel": TP}
    x, y = batch([1])

    def spoil(engine):
        if rank == 1:
            engine.model.up.weight[0, 0] = float("inf")

    return {
        "weight": fail(config, Net(), x, y, spoil),
        "forward": fail(config, Net(early="forward"), x, y),
        "backward": fail(config, Net(early="backward"), x, y),
    }


def test_a_tensor_group():
    found = same(run_ranks(of_a_tensor_group, 2, timeout=60))
    assert found["weight"][0] == ("weight", "up.weight", (), (1,))
    assert found["forward"][0] == ("output", "early", (), (0, 1))
    assert "on all ranks" in found["forward"][1]
    assert found["backward"][0][2] == ("'early' (Odd)",)


# -- stages of a pipeline --------------------------------------------------------------------------------------------


def of_stages(rank, world_size, parallel):
    """In the second microbatch only."""
    config = {**RAISE, "parallel": parallel}
    x, y = batch([2])
    bad_y = y.clone()
    bad_y[3] = 9
    found = {}
    for where in ("early", "late"):
        for what in ("forward", "backward"):
            found[where, what] = fail(config, Row(**{where: what}), x, y)
    found["both"] = fail(config, Row(early="forward", late="forward"), x, y)
    found["loss"] = fail(config, Row(), x, bad_y, loss=bad_criterion9)
    bad = x.clone()
    bad[0, 0] = float("nan")
    found["input"] = fail(config, Row(), bad, y)
    return found


@pytest.mark.parametrize("parallel", [ROW_PIPE, ROW_INTERLEAVED], ids=["1f1b", "interleaved"])
def test_stages(parallel):
    found = same(run_ranks(of_stages, 2, parallel, timeout=120))
    first = (0,)
    late = (1,) if parallel is ROW_PIPE else (0,)  # of four stages the third
    assert found["early", "forward"][0] == ("output", "1.inner", (), first if parallel is ROW_PIPE else (1,))
    assert found["late", "forward"][0] == ("output", "4.inner", (), late)
    for where, name in (("early", "1.inner"), ("late", "4.inner")):
        kind, _, around, _ = found[where, "backward"][0]
        assert (kind, around) == ("gradient", (f"'{name}' (Odd)",)), found[where, "backward"][1]
    assert found["both"][0][1] == "1.inner"
    assert found["loss"][0][0] == "loss"
    assert found["input"][0][:2] == ("input", "input")


# -- what fails on one rank ------------------------------------------------------------------------------------------


class Breaks(nn.Module):
    """Of its third forward, the replay, on rank 1."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def forward(self, x):
        return Broken.apply(x, self.rank)


class Broken(torch.autograd.Function):
    """Counts where a replay does not see it."""

    calls = 0

    @staticmethod
    def forward(ctx, x, rank):
        Broken.calls += 1
        if Broken.calls == 3 and rank == 1:
            raise KeyError("no more")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def failing_replay(rank, world_size):
    x, y = batch([2])
    model = nn.Sequential(Row(early="forward"), Breaks(rank))
    return fail(RAISE, model, x, y)


def test_a_replay_that_fails_on_one_rank():
    words, text = same(run_ranks(failing_replay, 2, timeout=60))
    assert words is None
    assert "the last batch was not computed once more: KeyError: 'no more' (rank 1)" in text
    assert "different places" not in text


def different_calls(rank, world_size):
    """Rank 1 computes its loss in the loop."""
    model = Row(late="forward")
    engine = halfmesh.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), criterion, config=RAISE, device="cpu"
    )
    x, y = batch([1])
    output = engine(x)
    engine.backward(criterion(output, y) if rank else engine.criterion(output, y))
    with pytest.raises(halfmesh.NonFiniteError) as caught:
        engine.step()
    return str(caught.value.diagnosis)


def test_ranks_that_call_differently():
    text = same(run_ranks(different_calls, 2, timeout=60))
    assert "the ranks did not call the engine alike for their last batches" in text
