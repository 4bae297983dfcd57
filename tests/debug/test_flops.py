"""engine.count_flops and the throughput hook: what a model multiplies, in every layout; nothing of the run changes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.hooks import ThroughputHook
from tests.support.checkpoint_runs import FP16, differing, make_engine, whole_state
from tests.support.models import CLASSES, FEATURES, make_data
from tests.support.ranks import here, rank_device, run_ranks

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
    return halfmesh.initialize(model, torch.optim.SGD(params, lr=0.1), criterion, config=config, device=rank_device())


def counted(engine, inputs, target):
    inputs, target = here((inputs, target))
    try:
        with engine.count_flops() as flops:
            engine.backward(engine.criterion(engine(inputs), target))
    finally:
        engine.zero_grad()
    return flops


def text(samples):
    ids = torch.randint(0, 256, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def token_loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def layers(first=nn.Linear):
    return nn.Sequential(first(FEATURES, 5), nn.Linear(5, CLASSES))


def frozen(*sizes):
    return nn.Linear(*sizes).requires_grad_(False)


FIRST, SECOND = 2 * FEATURES * 5, 2 * 5 * CLASSES


@pytest.mark.parametrize(
    ("model", "samples", "expected"),
    [
        (layers(), make_data(6), {FP32: 6 * (2 * FIRST + 3 * SECOND)}),
        (layers(), (make_data(6)[0].requires_grad_(), make_data(6)[1]), {FP32: 6 * (3 * FIRST + 3 * SECOND)}),
        (layers(frozen), make_data(6), {FP32: 6 * (FIRST + 2 * SECOND)}),
    ],
    ids=["layers", "inputs with gradient", "frozen"],
)
def test_layers(model, samples, expected):
    assert counted(engine_of(model), *samples) == expected


@pytest.mark.parametrize(
    ("options", "config", "dtype"),
    [
        ({}, {}, FP32),
        ({"dropout": 0.1}, {}, FP32),  # another kernel of attention
        ({}, {"bf16": {"mode": "naive"}}, "torch.bfloat16"),
        ({}, {"activation_checkpoint": True}, FP32),
        pytest.param({}, {"compile": {"backend": "aot_eager"}}, FP32, marks=pytest.mark.slow),
    ],
)
def test_a_transformer(options, config, dtype):
    """What is computed again does not count."""
    assert counted(engine_of(make_gpt(**options), token_loss, **config), *text(3)) == {dtype: 3 * GPT}


def test_an_operator_without_a_formula_is_refused_and_trained_all_the_same(caplog):
    name = "halfmesh_test_flops::twice"

    @torch.library.custom_op(name, mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_autograd(lambda ctx, grad: grad * 2)

    class Custom(nn.Linear):
        def forward(self, x):
            return twice(super().forward(x))

    engine, hook = engine_of(Custom(FEATURES, CLASSES)), ThroughputHook()
    with pytest.raises(halfmesh.InputError, match=f"no formula is known for {name}; register one"):
        counted(engine, *make_data(6))
    halfmesh.Trainer(engine).fit([make_data(6)], epochs=1, hooks=[hook])
    assert (engine.global_step, hook.flops) == (1, {})
    assert "give ThroughputHook flops_per_sample" in caplog.text


def test_an_optimizer_that_multiplies_matrices_does_not_count():
    model = layers()
    matrices = [param for param in model.parameters() if param.dim() == 2]
    engine = halfmesh.initialize(
        model, torch.optim.Muon(matrices, lr=0.1), nn.functional.cross_entropy, config={}, device="cpu"
    )
    samples, target = make_data(6)
    with engine.count_flops() as flops:
        engine.backward(engine.criterion(engine(samples), target))
        engine.step()
    assert flops == {FP32: 6 * (2 * FIRST + 3 * SECOND)}


def measured(rank, world_size, cells):
    """FLOPs of a sample that the hook finds; and those of a GPT in a pipeline."""
    found = []
    for layout, mode in cells:
        engine, hook = make_engine(layout, mode, dropout=0.1), ThroughputHook()
        halfmesh.Trainer(engine).fit(max_steps=1, hooks=[hook])
        found.append(sum(hook.flops.values()))
        engine.close()
    engine = engine_of(make_gpt(), token_loss, parallel={"pipeline": {"size": world_size, "microbatches": 2}})
    found.append(counted(engine, *text(4))[FP32] / 4)
    engine.close()
    engine = make_engine("tp2", "none")
    with pytest.raises(halfmesh.InputError, match="not counted under tensor parallelism"):
        counted(engine, *make_data(4))
    return found


@pytest.mark.distributed
@pytest.mark.sends
def test_every_layout_has_those_of_one_process():
    """To the last operation, for each sample."""
    cells = [("dp2", "torch"), ("fsdp", "none"), ("pp2", "none")]
    assert run_ranks(measured, 2, cells, timeout=200) == [[*[NET] * len(cells), GPT]] * 2


class Reports(halfmesh.Hook):
    """Of each update."""

    def before_fit(self, trainer):
        self._block = None

    def before_batch(self, trainer, batch):
        if self._block is None:
            self._block = trainer.engine.precision_report()
            self._block.__enter__()

    def after_step(self, trainer, result):
        self._block.__exit__(None, None, None)
        self._block = None


def with_and_without(rank, world_size, cells):
    """What differs, with dropout, BatchNorm and accumulation, in a run with counts or precision reports."""
    found = []
    for layout, mode in cells:
        states = []
        for hooks in ([], ["throughput"], [Reports()]):
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(3)
            engine = make_engine(layout, mode, dropout=0.1, gradient_accumulation=2)
            halfmesh.Trainer(engine).fit(max_steps=3, hooks=hooks)
            states.append(whole_state(engine))
        found += differing(states[1], states[0]) + differing(states[2], states[0])
    return found


@pytest.mark.distributed
@pytest.mark.sends
def test_training_is_the_same_to_the_bit():
    assert with_and_without(0, 1, [("one", mode) for mode in FP16]) == []
    cells = [("tp2", "torch"), ("pp2", "naive"), ("fsdp", "none")]
    assert run_ranks(with_and_without, 2, cells, timeout=120) == [[]] * 2
