"""A report, or a diagnosis that is caught, in the middle of a run: what follows is the same to the last bit."""

from __future__ import annotations

import copy
import random
from collections import defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.engine.health.probes import CRITERION, Listener
from halfmesh.engine.health.replay import replay
from halfmesh.engine.rank_random import rank_random
from tests.support.checkpoint_runs import LAYOUTS, make_engine
from tests.support.models import make_data
from tests.support.ranks import run_ranks

OPTIONS = {"gradient_accumulation": 2, "clip_grad_norm": 1.0, "on_nonfinite": "raise"}
BATCHES, REPORTED, SPOILT = 8, (1, 5), 3  # the end of a cycle each


def train(engine, looks):
    """Losses, scales, weights and random numbers of a run. With `looks`, reports are made, and the error is "
    "explained."""
    random.seed(3), np.random.seed(3), torch.manual_seed(3 + engine.context.dp_rank)
    if not looks:
        engine._explain = lambda error: None
    seen, count = [], 0
    while count < BATCHES:
        for x, y in engine.dataloader:
            if count == SPOILT:
                x = x.clone()
                x[0, 0] = float("inf")
            engine.zero_grad()
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            error = None
            try:
                engine.step()
            except halfmesh.NonFiniteError as raised:
                error = raised
            assert (error is None) == (count != SPOILT)
            assert error is None or (error.diagnosis.fault.kind if looks else error.diagnosis) == (
                "input" if looks else None
            )
            if looks and count in REPORTED:
                assert engine.precision_report().notes == ()
            if count == SPOILT and engine.model.norm.running_mean is not None:
                engine.model.norm.reset_running_stats()
            seen.append((loss.item() if count != SPOILT else 0.0, engine.loss_scale, engine.skipped_steps))
            count += 1
            if count == BATCHES:
                break
    drawn = rank_random(engine.context, engine._division)
    kept = {name: piece.held.clone() for name, piece in engine._run.holding.weights().items()}
    kept |= {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.model.modules())
    engine.close()
    return seen, kept, drawn, hooks


def two_runs(layout, mode, **options):
    """What differs between them on this rank."""
    runs = [
        train(make_engine(layout, mode, seed=1, dropout=0.3, shuffle=True, **OPTIONS, **options), looks)
        for looks in (False, True)
    ]
    (seen, kept, drawn, hooks), (seen2, kept2, drawn2, hooks2) = runs
    found = [] if seen == seen2 else [f"losses or scales {seen} {seen2}"]
    found += [name for name in kept if not torch.equal(kept[name], kept2[name])]
    found += [key for key in drawn if not equal(drawn[key], drawn2[key])]
    return found + ([] if hooks == hooks2 else ["hooks"])


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return all(map(equal, a, b))
    return a == b


def all_modes(rank, world_size, layout, modes):
    return {mode: two_runs(layout, mode) for mode in modes}


@pytest.mark.parametrize("mode", ["none", "torch", "naive"])
def test_one_process(mode):
    assert two_runs("one", mode) == []


@pytest.mark.parametrize(
    "options",
    [{"activation_checkpoint": {"patterns": ["up", "drop"]}}, {"compile": {"backend": "eager"}}],
    ids=["checkpoint", "compile"],
)
def test_computed_again_or_compiled(options):
    assert two_runs("one", "torch", **options) == []


@pytest.mark.distributed
@pytest.mark.parametrize("layout", [layout for layout, (ranks, _) in LAYOUTS.items() if ranks > 1])
def test_several_ranks(layout):
    modes = ("torch", "naive") if LAYOUTS[layout][0] == 2 else ("naive",)
    found = run_ranks(all_modes, LAYOUTS[layout][0], layout, modes, timeout=180)
    assert found == [{mode: [] for mode in modes}] * LAYOUTS[layout][0]


class Remembers(nn.Module):
    """Keeps what is no buffer: a count, outputs, a generator of its own, a tensor that is written in place."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.count, self.outputs, self.generator = 0, [], torch.Generator().manual_seed(1)
        self.total = torch.zeros(())
        self.register_buffer("moving", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.count += 1
        output = self.inner(x) + torch.rand(4, generator=self.generator)
        self.outputs.append(self.count)
        self.total += 1
        self.moving = self.moving + 1
        self.cache = output
        x.data.add_(1)
        return output


def test_what_a_model_keeps_is_as_it_was():
    model, scale = Remembers(), nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfmesh.initialize(model, optimizer, Weighs(scale), config={}, device="cpu")
    x, _ = make_data(4)
    extra = nn.Parameter(torch.ones(8))  # trained elsewhere
    given = x * extra
    engine.backward(engine.criterion(engine(given)))
    result = engine.step()
    assert result is not None
    own, cache, moving, state = scale.weight.grad.clone(), model.cache, model.moving, model.generator.get_state()
    grad = extra.grad.clone()
    engine.precision_report()
    assert (model.count, model.outputs, model.total.item()) == (1, [1], 1.0)
    assert model.moving is moving
    assert moving.tolist() == [1.0] * 4
    assert model.cache is cache
    assert torch.equal(model.generator.get_state(), state)
    assert torch.equal(scale.weight.grad, own)
    assert torch.equal(extra.grad, grad)
    assert torch.equal(given, x + 1)
    assert all(p.grad is None for p in model.parameters())


class Writes(nn.Module):
    """Keeps what its own forward changes in parameters that are not trained, and in containers within others."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.codes, self.rebound, self.free = (nn.Parameter(torch.ones(4), requires_grad=False) for _ in range(3))
        self.another = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.several = nn.ParameterList([nn.Parameter(torch.zeros(2), requires_grad=False)])
        self.history, self.counts, self.pair = {"a": []}, [[0]], ([], {})
        self.tensors, self.by_name, self.array = [torch.zeros(4)], {"a": {"b": torch.zeros(2)}}, np.zeros(2)
        self.seen, self.queue, self.drawn = defaultdict(list), [deque([1, 2], maxlen=2)], [random.Random(1)]
        self.itself = [0]
        self.itself.append(self.itself)
        self.register_buffer("wide", torch.zeros(1, 4).expand(3, 4))

    def forward(self, x):
        output = self.inner(x)
        with torch.no_grad():
            self.codes.mul_(0.5).add_(output.float().mean(0))
            self.free.data.add_(1)
            self.rebound.data = self.rebound.data * 0.5
            self.several[0].add_(1)
            self.another = nn.Parameter(self.another + 1, requires_grad=False)
            self.tensors[0] += 1
            self.by_name["a"]["b"] += 1
            self.array += 1
            self.wide[:1] += 1
        self.history["a"].append(1)
        self.counts[0][0] += 1
        self.pair[0].append(1)
        self.pair[1][len(self.pair[1])] = 1
        self.seen["x"].append(1)
        self.queue[0].append(self.counts[0][0])
        self.drawn[0].random()
        self.itself[0] += 1
        return output * self.codes

    def state(self):
        frozen = [self.codes, self.rebound, self.free, self.several[0], self.another]
        tensors = [p.detach() for p in frozen] + [self.tensors[0], self.by_name["a"]["b"], self.wide]
        numbers = [t.tolist() for t in tensors], [p.data_ptr() for p in frozen], self.array.tolist(), self.itself[0]
        kept = self.history, self.counts, self.pair, self.seen, self.queue, self.drawn[0].getstate()
        return copy.deepcopy((numbers, kept))


@pytest.mark.parametrize("config", [{}, {"fp16": {"mode": "naive"}}, {"fp16": {"mode": "torch"}}], ids=str)
@pytest.mark.parametrize("owner", ["model", "criterion"])
def test_what_a_forward_writes_is_as_it_was(config, owner):
    writes, other = Writes(), nn.Linear(8, 8)
    model = writes if owner == "model" else other
    trained = [p for p in model.parameters() if p.requires_grad]
    criterion = nn.MSELoss() if owner == "model" else Through(writes)
    engine = halfmesh.initialize(model, torch.optim.SGD(trained, lr=0.1), criterion, config=config, device="cpu")
    x, _ = make_data(4)
    engine.backward(engine.criterion(engine(x), torch.zeros(4, 4)))
    engine.step()
    before = writes.state()
    assert engine.precision_report().notes == ()
    assert writes.state() == before
    assert before[0][3] == before[1][1][0][0] == 1


class Through(nn.Module):
    """A criterion that is a model itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, output, target):
        return nn.functional.mse_loss(self.inner(output.float()), target)


class Clamped(nn.Linear):
    """Changes its trained weights in its forward."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def test_trained_weights_that_a_forward_writes_are_told():
    engine = make_engine("one", "none", model=nn.Sequential(nn.Linear(8, 8), Clamped(8, 4)))
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    (note,) = engine.precision_report().notes
    assert "changes trained parameters by itself (1.weight)" in note


@pytest.mark.parametrize("config", [{}, {"bf16": {"mode": "naive"}}, {"fp16": {"mode": "torch"}}], ids=str)
def test_weights_that_are_computed_are_not_computed_for_their_sizes(config):
    """Spectral norm changes its buffers whenever the weight is read."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfmesh.initialize(model, optimizer, nn.MSELoss(), config=config, device="cpu")
    engine.backward(engine.criterion(engine(torch.randn(4, 8)), torch.zeros(4, 4)))
    engine.step()
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    report = engine.precision_report()
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.state_dict().items())
    sizes = [layer.odd_sizes for layer in report.layers]
    assert not config or ("out_features=4",) in sizes


class Weighs(nn.Module):
    """A criterion with a parameter of its own, which no optimizer holds."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, output):
        return self.inner(output).square().sum()


def test_no_gradients_are_left_over():
    engine = make_engine("one", "torch")
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    assert engine.precision_report() == engine.precision_report()
    with pytest.raises(halfmesh.InputError, match="called before engine"):
        engine.step()


class Counts(Listener):
    def __init__(self):
        self.seen = []

    def entered(self, visit):
        self.seen.append(("in", visit.name))

    def left(self, visit, outputs):
        self.seen.append(("out", visit.name))


@pytest.mark.parametrize("patterns", [None, ["1"]])
def test_what_is_computed_again_counts_once(patterns):
    options = {} if patterns is None else {"activation_checkpoint": {"patterns": patterns}}
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout()), nn.Linear(8, 4))
    engine = make_engine("one", "none", model=model, **options)
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    listener = Counts()
    assert replay(engine._parts, engine._seen, listener) == []
    names = ["", "0", "1", "1.0", "1.1", "1.2", "2", CRITERION]
    assert sorted(listener.seen) == sorted((end, name) for name in names for end in ("in", "out"))


def forward_only(rank, world_size):
    """Whether all weights are in parts, before a report that computes no backward and after it."""
    data = {"strategy": "fsdp", "reshard_after_forward": False}
    engine = make_engine("fsdp", "naive", parallel={"data": data})
    x, y = make_data(8)
    engine.backward(nn.functional.cross_entropy(engine(x), y))
    engine.step()
    before = [hasattr(param, "to_local") for param in engine.model.parameters()]
    engine.precision_report()
    after = [hasattr(param, "to_local") for param in engine.model.parameters()]
    engine.backward(nn.functional.cross_entropy(engine(x), y))
    return before == after, engine.step().skipped


@pytest.mark.distributed
def test_a_forward_alone_leaves_no_weights_gathered():
    assert run_ranks(forward_only, 2, timeout=60) == [(True, False)] * 2


def test_training_flags_stay():
    engine = make_engine("one", "none", dropout=0.3)
    engine.model.norm.eval()
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    flags, before = [m.training for m in engine.model.modules()], engine.model.norm.running_mean.clone()
    engine.precision_report()
    assert [m.training for m in engine.model.modules()] == flags
    assert torch.equal(engine.model.norm.running_mean, before)
