"""A dry run: what each kind of rank holds and sends, what it refuses, and the smallest change by which it fits."""

from __future__ import annotations

import pytest

from halfmesh import load_config
from halfmesh.plan.advice import Asked, find_change
from halfmesh.plan.dry_run import dry_run_with, needed
from halfmesh.plan.rehearsal import Place, rehearse
from halfmesh.plan.tracker import Traffic
from halfmesh.plan.workers import Workers
from tests.support.llama import SMALL, WIDE

slow = pytest.mark.slow


def pipeline(microbatches, schedule="1f1b", size=2, **parallel):
    chunks = {"chunks": 2} if schedule == "interleaved" else {}
    keys = {"size": size, "microbatches": microbatches, "schedule": schedule} | chunks
    return load_config({"parallel": {"pipeline": keys, **parallel}})


def dry_run(config, world_size, model, batch=()):
    """In this process: tests of the command start others."""
    return dry_run_with(Workers(1, False), config, world_size, model, batch)


@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(s, marks=pytest.mark.slow) for s in ("gpipe", "interleaved"))]
)
def test_what_is_extrapolated_is_what_is_run(schedule):
    config = pipeline(20, schedule)
    run = dry_run(config, 2, SMALL, ("20,32:int64",))
    assert run.extrapolated is not None
    for rank, said in run.ranks.items():
        whole = rehearse(config, SMALL, ("20,32:int64",), Place(rank, 2))  # all microbatches
        assert said.peak == pytest.approx(whole.peak, rel=1e-3)
        assert said.kept == pytest.approx(whole.kept, rel=1e-3)
        assert (said.traffic, said.rows) == (whole.traffic, 20)
        for part, size in whole.parts.items():
            assert said.parts[part] == pytest.approx(size, rel=1e-2, abs=4096), part


def test_messages():
    """1f1b, 4 microbatches over 2 stages; activations are [2, 32, 64] in fp32, and each block sums two of them over tp
    in its forward and two in its backward."""
    figures = rehearse(pipeline(4, tensor=2), SMALL, (), Place(0, 8))
    block, embedding, compared = 4, 1, 1
    activation = 2 * 32 * 64 * 4
    sent = Traffic(4 + 1, 4 * activation + 16)  # and the loss, from the last stage
    # torch up to 2.13 takes a vote before the first batch: by what it calls a reduction, or not.
    votes = [Traffic(sent.messages + 1, sent.bytes + 4, reduced) for reduced in (0, 4)]
    assert figures.traffic["pp"] in [sent, *votes]
    assert figures.traffic["tp"].messages == 4 * (2 * block + embedding) + compared
    assert figures.traffic["dp"].messages == 1
    assert figures.traffic["dp"].bytes == pytest.approx(figures.numel * 4, rel=1e-2)


def test_what_accumulated_batches_send():
    def sent(cycle, parallel):
        config = load_config({"parallel": parallel, "gradient_accumulation": cycle})
        return rehearse(config, SMALL, (), Place(0, 4)).traffic

    two, five = (sent(cycle, {"tensor": 2}) for cycle in (2, 5))
    assert five["dp"] == two["dp"]
    assert five["dp"].messages == 1
    assert five["tp"].messages - 1 == (two["tp"].messages - 1) / 2 * 5  # one compares gradients, once an update
    once, five = (sent(cycle, {"data": "fsdp"})["dp"].bytes for cycle in (1, 5))
    gathered = once * 2 / 3  # of weights, in forward and backward; the rest are gradients, sent once
    assert five == pytest.approx(once + 4 * gathered, rel=0.01)


def test_accumulation_that_follows_from_the_global_batch():
    """20 rows on each of 2 data ranks; also where fewer microbatches are run than there are."""
    runs = [
        dry_run(pipeline(20).replace(**keys), 4, SMALL, ("20,32:int64",))
        for keys in ({"gradient_accumulation": 3}, {"global_batch_size": 120})
    ]
    assert runs[0].ranks == runs[1].ranks
    assert runs[0].ranks != dry_run(pipeline(20), 4, SMALL, ("20,32:int64",)).ranks
    refused = dry_run(pipeline(20).replace(global_batch_size=100), 4, SMALL, ("20,32:int64",))
    assert "global_batch_size: 100 is no multiple of batch size 20 x 2 data rank(s)" in refused.problems[0]


def test_all_kinds_of_ranks():
    run = dry_run(pipeline(8, size=4, tensor=2), 4096, SMALL)
    assert run.problems == []
    assert list(run.ranks) == [0, 2048, 3072]
    assert run.bubble == pytest.approx(3 / 11)
    assert run.rows == 8
    assert needed(run.largest[1]) == max(figures.peak for figures in run.ranks.values())


# --- models and batches --------------------------------------------------------------------------------------------

MODULE = """
from torch import nn
from tests.support import llama
MODEL = nn.Linear(2, 2)
def bare(): return llama.small()[0]
def fails(): return nn.Linear(2, 2).weight.sum().item()
def returns_text(): return "a model"
def no_pair(): return nn.Linear(2, 2), 1, nn.MSELoss()
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(MODULE)
    (tmp_path / "broken_models.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_model_without_inputs(models):
    run = dry_run(load_config({}), 1, "my_models:bare")
    (figures,) = run.ranks.values()
    assert (figures.peak, figures.traffic) == (None, {})
    assert figures.parts["gradients"] == figures.numel * 4
    assert figures.parts["optimizer"] > figures.numel * 8
    assert "give --batch, or let build return (model, inputs)" in run.notes[0]
    whole = dry_run(load_config({}), 1, "my_models:bare", ("8,32:int64",))
    assert next(iter(whole.ranks.values())).peak > figures.kept


@pytest.mark.parametrize(
    ("model", "batch", "words"),
    [
        ("my_models", (), "name a function as package.module:build"),
        ("my_model:build", (), "there is no module 'my_model'"),
        ("my_models:bar", (), "my_models.bar does not exist; did you mean 'bare'?"),
        ("my_models:MODEL", (), "my_models.MODEL is no function"),
        ("my_models:fails", (), "load no weights"),
        ("my_models:returns_text", (), "it returned str; let it return the model"),
        ("my_models:no_pair", (), "the second has to be (inputs, targets)"),
        ("broken_models:build", (), "importing broken_models raised ZeroDivisionError: division by zero"),
        (SMALL, ("8,2:int46",), "'int46' is no dtype; did you mean 'int64'"),
        (SMALL, ("8x2",), "'8x2' is not a shape; write --batch 8,2048:int64"),
        (SMALL, ("8,64:int64",), "calling the model with [8, 64] int64 raised "),
    ],
)
def test_what_cannot_be_run(models, model, batch, words):
    problems = dry_run(load_config({}), 1, model, batch).problems
    assert any(words in problem for problem in problems), problems


def test_all_problems_at_once():
    problems = dry_run(pipeline(3, size=3, tensor=3), 9, SMALL).problems
    assert any("does not divide the 8 rows" in problem and "give 6 or 9 rows" in problem for problem in problems)
    assert any("8 heads are not divisible by tensor=3" in problem for problem in problems)


# --- the smallest change -------------------------------------------------------------------------------------------

NAIVE = {"bf16": {"mode": "naive"}}
ZERO1 = {"parallel": {"data": "zero1"}}
FSDP = {"parallel": {"data": "fsdp"}, "activation_checkpoint": "full"}


@pytest.mark.parametrize(
    ("config", "part", "what"),
    [
        (NAIVE, 0.99, "zero1 (parallel = dict(data='zero1'))"),
        pytest.param(NAIVE | ZERO1, 0.8, "activation_checkpoint = 'selective'", marks=slow),
        (NAIVE, 0.7, "activation_checkpoint = 'full'"),
        (NAIVE, 0.6, "batches of 2 rows in place of 8, with gradient_accumulation=4"),
        pytest.param(FSDP, 0.9, "batches of 4 rows in place of 8, with gradient_accumulation=2", marks=slow),
        pytest.param(NAIVE, 0.5, "parallel.tensor=4 in place of 1", marks=slow),
        pytest.param(NAIVE, 0.45, "zero1 and activation_checkpoint = 'full'", marks=slow),
        (NAIVE, 0.001, None),
    ],
)
def test_the_smallest_change(config, part, what):
    """For a device with `part` of what is needed."""
    change, limit = advise(config, part, 4, SMALL)
    if what is None:
        assert change is None
        return
    assert change.what == what
    assert change.bytes <= limit
    assert change.is_estimate == ("checkpoint" not in what)
    rows = 8 // change.config.gradient_accumulation
    real = dry_run(change.config, 4, SMALL, (f"{rows},32:int64",))
    assert change.bytes == pytest.approx(needed(real.largest[1]), rel=0.15)


def advise(config, part, world_size, model):
    config = load_config(config)
    run = dry_run(config, world_size, model)
    limit = round(part * needed(run.largest[1]))
    return find_change(config, Asked(run, world_size, "cuda", limit, model)), limit


@slow
def test_fsdp_comes_after_zero1():
    change, limit = advise(NAIVE | ZERO1, 0.7, 16, WIDE)
    assert change.what == "fsdp (parallel = dict(data='fsdp'))"
    real = dry_run(change.config, 16, WIDE)
    assert change.bytes == pytest.approx(needed(real.largest[1]), rel=0.1)
    assert needed(real.largest[1]) <= limit
