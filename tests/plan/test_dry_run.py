"""A whole plan: all kinds of ranks, messages, extrapolation, problems."""

from __future__ import annotations

import pytest

from halfmesh.config.load import load_config
from halfmesh.plan.dry_run import choose_counts, dry_run, extrapolate, find_model_problems, needed
from halfmesh.plan.rehearsal import Place, rehearse
from halfmesh.plan.tracker import Traffic
from tests.support.llama import SMALL


def pipeline(microbatches, schedule="1f1b", size=2, **parallel):
    chunks = {"chunks": 2} if schedule == "interleaved" else {}
    keys = {"size": size, "microbatches": microbatches, "schedule": schedule} | chunks
    return load_config({"parallel": {"pipeline": keys, **parallel}})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("stage", [0, 1])
def test_what_is_extrapolated_is_what_is_run(schedule, stage):
    wanted = 20
    config = pipeline(wanted, schedule)
    few, more = choose_counts(config)
    assert few + more < wanted
    whole, one, other = (
        rehearse(config, SMALL, ("20,32:int64",), Place(stage, 2), count) for count in (None, few, more)
    )
    said = extrapolate(one, other, few, more, wanted)
    assert said.peak == pytest.approx(whole.peak, rel=1e-3)
    assert said.traffic == whole.traffic
    assert said.rows == whole.rows == 20
    assert said.kept == pytest.approx(whole.kept, rel=1e-3)
    for part, size in whole.parts.items():
        assert said.parts[part] == pytest.approx(size, rel=1e-2, abs=4096), part


def test_few_microbatches_are_all_run():
    assert choose_counts(pipeline(4)) is None
    assert choose_counts(pipeline(64)) == (3, 4)
    assert choose_counts(pipeline(2 * 10**9)) == (3, 4)
    assert choose_counts(pipeline(64, "interleaved")) == (6, 8)
    assert choose_counts(pipeline(64, "gpipe")) == (2, 3)


def test_messages():
    """1f1b, 4 microbatches over 2 stages; activations are [2, 32, 64] in fp32, and each block sums two of them over tp
    in its forward and two in its backward."""
    config = pipeline(4, tensor=2)
    figures = rehearse(config, SMALL, (), Place(0, 8))
    block, embedding, compared = 4, 1, 1
    activation = 2 * 32 * 64 * 4
    sent = Traffic(4 + 1, 4 * activation + 16)  # and the loss, from the last stage
    # torch up to 2.13 takes a vote before the first batch: by what it calls a reduction, or not.
    votes = [Traffic(sent.messages + 1, sent.bytes + 4, reduced) for reduced in (0, 4)]
    assert figures.traffic["pp"] in [sent, *votes]
    assert figures.traffic["tp"].messages == 4 * (2 * block + embedding) + compared
    assert figures.traffic["dp"].messages == 1
    assert figures.traffic["dp"].bytes == pytest.approx(figures.numel * 4, rel=1e-2)


def test_accumulated_batches_are_counted():
    def sent(cycle):
        config = load_config({"parallel": {"tensor": 2}, "gradient_accumulation": cycle})
        return rehearse(config, SMALL, (), Place(0, 4)).traffic

    two, five = sent(2), sent(5)
    assert five["dp"] == two["dp"]
    assert five["dp"].messages == 1
    assert five["tp"].messages - 1 == (two["tp"].messages - 1) / 2 * 5  # one compares gradients, once an update


def test_accumulated_batches_under_fsdp():
    def sent(cycle):
        config = load_config({"parallel": {"data": "fsdp"}, "gradient_accumulation": cycle})
        (figures,) = dry_run(config, 4, SMALL).ranks.values()
        return figures.traffic["dp"].bytes

    once, five = sent(1), sent(5)
    gathered = once * 2 / 3  # of weights, in forward and backward; the rest are gradients, sent once
    assert five == pytest.approx(once + 4 * gathered, rel=0.01)


def test_all_kinds_of_ranks():
    run = dry_run(pipeline(8, size=4, tensor=2), 4096, SMALL)
    assert run.problems == []
    assert list(run.ranks) == [0, 2048, 3072]
    assert [run.stage_of(rank) for rank in run.ranks] == [0, 2, 3]
    assert run.bubble == pytest.approx(3 / 11)
    assert run.rows == 8
    assert needed(run.largest[1]) == max(figures.peak for figures in run.ranks.values())


def test_without_inputs(tmp_path, monkeypatch):
    (tmp_path / "bare.py").write_text("import llama\ndef build(): return llama.small()[0]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = dry_run(load_config({}), 1, "bare:build")
    (figures,) = run.ranks.values()
    assert figures.peak is None
    assert figures.traffic == {}
    assert figures.parts["gradients"] == figures.numel * 4
    assert figures.parts["optimizer"] > figures.numel * 8
    assert "give --batch, or let build return (model, inputs)" in run.notes[0]


def test_all_problems_at_once():
    run = dry_run(pipeline(3, size=3, tensor=3), 9, SMALL)
    assert any("does not divide the 8 rows" in problem and "give 6 or 9 rows" in problem for problem in run.problems)
    assert any("8 heads are not divisible by tensor=3" in problem for problem in run.problems)


def test_problems_of_a_model_with_a_config_that_is_wrong_otherwise():
    problems = find_model_problems(load_config({"parallel": {"tensor": 3}}), 4, SMALL)
    assert any("8 heads are not divisible by tensor=3" in problem for problem in problems)
    assert find_model_problems(load_config({}), 1, "tests.support.llama:smal")[0].endswith(
        "name a function that builds the model"
    )


def test_a_call_that_fails():
    run = dry_run(load_config({}), 1, SMALL, ("8,64:int64",))
    assert "calling the model with" in run.problems[0]
    assert "[8, 64] torch.int64" in run.problems[0]


def test_what_is_left_out():
    config = load_config({"compile": True})
    run = dry_run(config, 1, SMALL)
    assert run.problems == []
    assert "compile is left out" in run.notes[0]
    offloaded = dry_run(load_config({"parallel": {"data": {"strategy": "fsdp", "cpu_offload": True}}}), 2, SMALL)
    assert offloaded.problems == []
    assert "keeps in host memory is counted here as if it were on the device" in offloaded.notes[0]


def test_a_dry_run_that_fails(tmp_path, monkeypatch):
    text = "import llama\nclass Odd(llama.Llama):\n    def named_parameters(self, *a, **k): raise OSError('disk')\n"
    (tmp_path / "odd.py").write_text(text + "def build(): return Odd(8, 1, 2, 2, 8, 16, 8)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (problem, *_) = dry_run(load_config({}), 1, "odd:build").problems
    assert problem == "the dry run failed with OSError: disk; a real run need not"
