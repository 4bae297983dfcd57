"""engine.count_flops: what a model multiplies, whatever the layout, without a trace in the run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfmesh
from halfmesh.hooks import ThroughputHook
from tests.support.checkpoint_runs import FP16, LAYOUTS, make_engine
from tests.support.models import CLASSES, FEATURES, make_data
from tests.support.ranks import run_ranks

FP32 = "torch.float32"
WIDTH, LENGTH, DEPTH = 16, 8, 2
NET = 2 * (FEATURES * 16 * 2 + 3 * (16 * 32 * 2 + 16 * 16) + 2 * 16 * 16 + 3 * 16 * CLASSES)
"""Of a sample: the first layer needs no gradient of its input, the frozen one none of its weights."""
TOKEN = DEPTH * 12 * WIDTH * WIDTH + 256 * WIDTH
"""Weights that a token is multiplied with: the blocks', and the tied head's."""
GPT = 6 * TOKEN * LENGTH + DEPTH * 12 * LENGTH * LENGTH * WIDTH
"""Of a sample: 6 for each weight and token; attention's two products, and four in backward (masked ones count)."""


def make_gpt(**options):
    from gpt import GPT

    return GPT(LENGTH, WIDTH, DEPTH, 2, **options)


def engine_of(model, criterion=nn.functional.cross_entropy, **config):
    params = [param for param in model.parameters() if param.requires_grad]
    return halfmesh.initialize(model, torch.optim.SGD(params, lr=0.1), criterion, config=config, device="cpu")


def counted(engine, *inputs, target):
    return engine.count_flops(lambda: engine.criterion(engine(*inputs), target))


def text(samples):
    ids = torch.randint(0, 256, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def token_loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def test_layers():
    x, y = make_data(6)
    layers = nn.Sequential(nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES))
    assert counted(engine_of(layers), x, target=y) == {FP32: 6 * (4 * FEATURES * 5 + 6 * 5 * CLASSES)}
    x = x.requires_grad_()
    assert counted(engine_of(layers), x, target=y) == {FP32: 6 * (6 * FEATURES * 5 + 6 * 5 * CLASSES)}


def test_frozen_layers():
    x, y = make_data(6)
    layers = nn.Sequential(nn.Linear(FEATURES, 5).requires_grad_(False), nn.Linear(5, CLASSES))
    assert counted(engine_of(layers), x, target=y) == {FP32: 6 * (2 * FEATURES * 5 + 4 * 5 * CLASSES)}


def test_convolutions():
    layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, stride=2), nn.Flatten())
    x, y = torch.randn(5, 3, 9, 9), torch.arange(5)
    first, second = 9 * 9 * 4 * 3 * 9, 4 * 4 * 2 * 4 * 9
    assert counted(engine_of(layers), x, target=y) == {FP32: 5 * (4 * first + 6 * second)}


@pytest.mark.parametrize("dropout", [0.0, 0.1])  # another kernel of attention
def test_a_transformer(dropout):
    ids, target = text(3)
    assert counted(engine_of(make_gpt(dropout=dropout), token_loss), ids, target=target) == {FP32: 3 * GPT}


def test_precisions_are_told_apart():
    ids, target = text(3)
    naive = counted(engine_of(make_gpt(), token_loss, bf16={"mode": "naive"}), ids, target=target)
    assert naive == {"torch.bfloat16": 3 * GPT}
    autocast = counted(engine_of(make_gpt(), token_loss, bf16={"mode": "torch"}), ids, target=target)
    assert autocast == {"torch.bfloat16": 3 * GPT}

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)

        def forward(self, x):
            x = self.a(x)
            with torch.autocast("cpu", enabled=False):
                return self.b(x.float())

    x, y = make_data(2)
    mixed = counted(engine_of(Mixed(), bf16={"mode": "torch"}), x, target=y)
    assert mixed == {"torch.bfloat16": 2 * 4 * FEATURES * 4, FP32: 2 * 6 * 4 * CLASSES}


def test_what_is_computed_again_does_not_count():
    ids, target = text(3)
    engine = engine_of(make_gpt(), token_loss, activation_checkpoint=True)
    assert counted(engine, ids, target=target) == {FP32: 3 * GPT}

    class Own(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    x, y = make_data(6)
    layers = nn.Sequential(Own(nn.Linear(FEATURES, 5), nn.GELU()), nn.Linear(5, CLASSES))
    assert counted(engine_of(layers), x, target=y) == {FP32: 6 * (4 * FEATURES * 5 + 6 * 5 * CLASSES)}


def test_compiled():
    ids, target = text(3)
    engine = engine_of(make_gpt(), token_loss, compile={"backend": "aot_eager"})
    assert counted(engine, ids, target=target) == {FP32: 3 * GPT}


def test_what_has_no_formula():
    name = "halfmesh_test_flops::twice"

    @torch.library.custom_op(name, mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_autograd(lambda ctx, grad: grad * 2)

    class Custom(nn.Linear):
        def forward(self, x):
            return twice(super().forward(x))

    x, y = make_data(6)
    with pytest.raises(halfmesh.InputError, match=f"no formula is known for {name}; register one"):
        counted(engine_of(Custom(FEATURES, CLASSES)), x, target=y)


def test_mistakes():
    x, y = make_data(6)
    engine = engine_of(nn.Linear(FEATURES, CLASSES), gradient_accumulation=2)
    engine.backward(engine.criterion(engine(x), y))
    with pytest.raises(halfmesh.InputError, match=r"engine.count_flops\(\) was called after microbatch 1 of 2"):
        counted(engine, x, target=y)
    engine.step()
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    with pytest.raises(halfmesh.InputError, match=r"FLOPs cannot be counted: .*mat1 and mat2"):
        counted(engine, x.T, target=y)
    engine.backward(engine.criterion(engine(x), y))


CELLS = [(layout, mode) for layout in ("dp2", "zero1", "fsdp", "tp2", "pp2") for mode in ("none", "torch")]
FOUR = [("tp2_fsdp2", "none"), ("pp2_zero1", "torch")]
GPTS = {"tp2": {"tensor": 2}, "sp2": {"tensor": {"size": 2, "sequence_parallel": True}}}
GPTS["pp2"] = {"pipeline": {"size": 2, "microbatches": 2}}


def measured(rank, world_size, cells, gpts):
    """FLOPs of a sample that the hook finds; and those of a GPT."""
    found = []
    for layout, mode in cells:
        engine, hook = make_engine(layout, mode, dropout=0.1), ThroughputHook()
        halfmesh.Trainer(engine).fit(max_steps=1, hooks=[hook])
        found.append(sum(hook.state_dict()["flops"].values()))
        engine.close()
    for parallel in gpts:
        engine = engine_of(make_gpt(), token_loss, parallel=parallel)
        ids, target = text(4)
        found.append(counted(engine, ids, target=target)[FP32] / 4)
        engine.close()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "cells", "gpts"), [(2, CELLS, list(GPTS.values())), (4, FOUR, [])])
def test_every_layout_has_those_of_one_process(ranks, cells, gpts):
    """To the last operation, for each sample."""
    expected = [NET] * len(cells) + [GPT] * len(gpts)
    assert run_ranks(measured, ranks, cells, gpts, timeout=200) == [expected] * ranks


def weights_of(rank, world_size, cells):
    same = []
    for layout, mode in cells:
        weights = []
        for hooks in ([], ["throughput"]):
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(3)
            engine = make_engine(layout, mode, dropout=0.1, gradient_accumulation=2)
            halfmesh.Trainer(engine).fit(max_steps=3, hooks=hooks)
            engine.close()
            weights.append({name: value.clone() for name, value in engine.model.state_dict().items()})
        same.append(all(torch.equal(weights[0][name], value) for name, value in weights[1].items()))
    return same


def test_training_is_the_same_to_the_bit():
    """With dropout, BatchNorm and accumulation."""
    assert weights_of(0, 1, [("one", mode) for mode in FP16]) == [True] * len(FP16)


@pytest.mark.distributed
def test_training_of_ranks_is_the_same_to_the_bit():
    cells = [("tp2", "torch"), ("pp2", "naive"), ("fsdp", "none")]
    assert {LAYOUTS[layout][0] for layout, _ in cells} == {2}
    assert run_ranks(weights_of, 2, cells, timeout=120) == [[True] * 3] * 2


def test_what_cannot_be_counted_is_trained_all_the_same(caplog):
    calls = []

    def fails_first(engine, batch):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("mine")
        return halfmesh.compute_batch(engine, batch)

    def without_rows(engine, batch):
        outcome = halfmesh.compute_batch(engine, batch)
        return halfmesh.Outcome(outcome.loss, outcome.output, outcome.target, 0)

    for compute, reason in [
        (fails_first, "FLOPs cannot be counted: mine"),
        (without_rows, "the first batch has no rows"),
    ]:
        engine, hook = make_engine("one", "none"), ThroughputHook()
        halfmesh.Trainer(engine, compute=compute).fit(max_steps=1, hooks=[hook])
        assert engine.global_step == 1
        assert hook.state_dict()["flops"] == {}
        assert reason in caplog.text
    assert "give ThroughputHook flops_per_sample" in caplog.text


def test_it_is_counted_once_for_a_run():
    """Until other parameters are trained."""
    engine, calls = make_engine("one", "none"), []

    def compute(engine, batch):
        calls.append(1)
        return halfmesh.compute_batch(engine, batch)

    for steps, expected in [(1, 2), (2, 3), (3, 5)]:
        if steps == 3:
            engine.model.up.requires_grad_(False)
        hook = ThroughputHook()
        halfmesh.Trainer(engine, compute=compute).fit(max_steps=steps, hooks=[hook])
        assert len(calls) == expected
    assert hook.state_dict()["flops"] == {FP32: NET - 2 * 16 * 32}


def test_the_place_in_the_data_is_not_moved():
    """What is saved between the count and the batch's own training begins with that batch."""
    engine, places = make_engine("one", "none"), []

    class Place(halfmesh.Hook):
        def before_batch(self, trainer, batch):
            places.append(engine.dataloader.place)

    halfmesh.Trainer(engine).fit(max_steps=2, hooks=["throughput", Place()])
    assert places == [(0, 0), (0, 1)]


class InPlace(nn.Linear):
    """Writes into what it is given."""

    def forward(self, x):
        return super().forward(x.mul_(2))


def test_inputs_are_not_written_to():
    weights = []
    for hooks in ([], ["throughput"]):
        torch.manual_seed(0)
        engine = engine_of(InPlace(FEATURES, CLASSES))
        halfmesh.Trainer(engine).fit([make_data(4)], epochs=1, hooks=hooks)
        weights.append(engine.model.weight.detach())
    assert torch.equal(*weights)


def test_the_engine_has_seen_nothing(tmp_path):
    """Neither a batch to report on, nor a boundary to save at."""
    x, y = make_data(4)
    engine = engine_of(nn.Linear(FEATURES, CLASSES), checkpoint={"directory": str(tmp_path), "every": 1})
    counted(engine, x, target=y)
    with pytest.raises(halfmesh.InputError, match="no batch went forward in training mode yet"):
        engine.precision_report()
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    counted(engine, x, target=y)
    engine.wait_for_save()
    assert list(tmp_path.iterdir()) == []
    engine.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def of_another_layout(rank, world_size):
    """The state of rank 0 of a run with the same first stage: it fits here, and not on the other stage."""
    engine, hook = make_engine("pp2", "none"), ThroughputHook()
    trained = sum(param.numel() for param in engine.model.parameters() if param.requires_grad)
    whole = engine.context.everyone(trained)
    hook.load_state_dict({"flops": {FP32: 1.0}, "of": whole[0]})
    halfmesh.Trainer(engine).fit(max_steps=2, hooks=[hook])
    engine.close()
    return whole[0] != whole[1], hook._flops


@pytest.mark.distributed
def test_ranks_agree_on_whether_to_count():
    assert run_ranks(of_another_layout, 2, timeout=60) == [(True, {FP32: NET})] * 2
