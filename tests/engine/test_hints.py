"""What is added to torch.OutOfMemoryError; advice on fp32 products of a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.amp.recipe import FP32
from halfmesh.engine.hints import add_memory_note, tell_of_slow_products
from tests.support.fake_gpu import fake_gpu
from tests.support.models import MLP, make_engine, sgd, train
from tests.support.ranks import run_ranks

BATCH = "gradient_accumulation=2: makes the same updates with half the DataLoader's batch_size"
GLOBAL = "global_batch_size=16: already makes the same updates with half the DataLoader's batch_size"
MICROBATCHES = "parallel.pipeline.microbatches=4: makes each half as large"
CHECKPOINT = "activation_checkpoint=full: recomputes activations in backward"
OFFLOAD = "activation_offload=true: keeps activations in host memory until backward"
ZERO1 = "parallel.data.strategy=zero1: shards masters and optimizer state over the data ranks"
FSDP = "parallel.data.strategy=fsdp: shards model, gradients and optimizer state over the data ranks"
PLAN = "`halfmesh plan` finds the simplest changes that fit, without a GPU"
NAIVE = {"fp16": {"mode": "naive", "loss_scale": 8.0}}
SELECTIVE = {"activation_checkpoint": {"patterns": ["first"], "selective": True}}


class Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("in backward")


class FullSGD(torch.optim.SGD):
    def step(self, closure=None):
        raise torch.OutOfMemoryError("in the step")


class FullMLP(MLP):
    """Has too little memory in its forward, or backward."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def forward(self, x):
        if self.where == "forward":
            raise torch.OutOfMemoryError("in forward")
        return Full.apply(super().forward(x)) if self.where == "backward" else super().forward(x)


def criterion_of(where):
    def criterion(output, target):
        if where == "criterion":
            raise torch.OutOfMemoryError("in the criterion")
        return nn.functional.cross_entropy(output, target)

    return criterion


def notes(config, where="forward", grad=True):
    """Of the error that ends one step."""
    optimizer = FullSGD if where == "step" else torch.optim.SGD
    engine = make_engine(
        config, model=FullMLP(where), optimizer=lambda params: optimizer(params, lr=0.1), criterion=criterion_of(where)
    )
    with pytest.raises(torch.OutOfMemoryError) as raised, torch.set_grad_enabled(grad):
        train(engine)
    return raised.value.__notes__, engine.plan.rows["memory"]


def lines(given):
    """Of the one note: the title, and the points."""
    (note,), memory = given
    title, *points = note.split("\n  - ")
    assert title == f"This engine needs {memory}. These changes need less:"
    return points


@pytest.mark.parametrize("where", ["forward", "criterion", "backward", "step"])
def test_it_says_what_the_plan_needs_and_what_would_need_less(where):
    given = notes(NAIVE, where)
    assert "per rank without activations: parameters 1.0 KiB, masters 2.1 KiB, gradients" in given[1]
    assert lines(given) == [BATCH, CHECKPOINT, OFFLOAD, PLAN]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"gradient_accumulation": 3}, [BATCH.replace("=2", "=6"), CHECKPOINT, OFFLOAD, PLAN]),
        ({"activation_checkpoint": {"patterns": ["first"]}}, [BATCH, OFFLOAD, PLAN]),
        (SELECTIVE, [BATCH, CHECKPOINT, PLAN]),  # with "selective" nothing can be offloaded
        ({"activation_offload": True}, [BATCH, CHECKPOINT, PLAN]),
        ({"global_batch_size": 16}, [GLOBAL, CHECKPOINT, OFFLOAD, PLAN]),
    ],
    ids=["accumulation", "checkpoint", "selective", "offload", "global batch"],
)
def test_what_is_set_already_or_cannot_be_is_not_named(config, expected):
    assert lines(notes(config)) == expected


def test_in_an_evaluation_activations_are_not_kept():
    assert lines(notes({}, grad=False)) == [BATCH, PLAN]


def test_a_criterion_that_calls_the_engine_adds_it_once():
    def criterion(output, target):
        return engine(output).sum()

    engine = make_engine(model=FullMLP("forward"), criterion=criterion)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        engine.criterion(torch.ones(2, 8), None)
    assert len(raised.value.__notes__) == 1


def on_ranks(rank, world_size, parallel):
    engine, error = make_engine({"parallel": parallel}), torch.OutOfMemoryError("too much")
    add_memory_note(error, engine.plan, engine.config, engine.context)
    return lines((error.__notes__, engine.plan.rows["memory"]))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({}, [BATCH, CHECKPOINT, OFFLOAD, ZERO1, FSDP, PLAN]),
        ({"data": "zero1"}, [BATCH, CHECKPOINT, OFFLOAD, FSDP, PLAN]),
        ({"data": "fsdp"}, [BATCH, CHECKPOINT, PLAN]),  # which cannot be offloaded
        (
            {"pipeline": {"size": 2, "microbatches": 2, "partition": ["tied"]}},
            [MICROBATCHES, CHECKPOINT, OFFLOAD, PLAN],
        ),
    ],
    ids=["replicate", "zero1", "fsdp", "pipeline"],
)
def test_ranks_may_share_more(parallel, expected):
    assert run_ranks(on_ranks, 2, parallel) == [expected] * 2


# -- fp32 products ---------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(monkeypatch):
    """torch's, of a GPU with TF32; given back."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 0))
    yield torch.backends
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.backends.fp32_precision = "none"


def advice(caplog, recipe=FP32):
    tell_of_slow_products(recipe, torch.device("cuda"))
    return "matrix products run in fp32 without TF32" in caplog.text


def test_a_gpu_without_tf32_gets_advice(settings, caplog):
    assert advice(caplog)


@pytest.mark.parametrize(
    "use",
    [
        lambda: setattr(torch.backends, "fp32_precision", "tf32"),
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: torch.set_float32_matmul_precision("high"),
    ],
    ids=["all", "matmul", "allow_tf32", "high"],
)
def test_with_tf32_there_is_no_advice(use, settings, caplog):
    use()
    assert not advice(caplog)


def test_where_there_is_no_fp32_or_no_tf32_there_is_no_advice(settings, caplog, monkeypatch):
    assert not advice(caplog, dataclasses.replace(FP32, compute_dtype=torch.bfloat16, autocast=True))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (7, 0))
    assert not advice(caplog)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a build of torch for CUDA")
def test_an_engine_on_a_gpu_asks_for_it(monkeypatch):
    asked = []
    monkeypatch.setattr("halfmesh.engine.initialize.tell_of_slow_products", lambda *given: asked.append(given))
    make_engine()
    with fake_gpu(), torch.device("cuda", 0):
        model = MLP()
        halfmesh.initialize(model, sgd(model.parameters()), config={}, device="cuda")
    assert asked == [(FP32, torch.device("cuda", 0))]


def test_both_of_torchs_apis_read_what_the_page_about_speed_advises(settings):
    """inductor's autotuning and FlexAttention still read the old one, which fails after the present setters."""
    torch.set_float32_matmul_precision("high")
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.get_float32_matmul_precision() == "high"
