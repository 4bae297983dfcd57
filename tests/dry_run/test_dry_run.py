"""A dry run: what each kind of rank holds and sends, and what it rejects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfmesh import load_config
from halfmesh.dry_run.dry_run import dry_runs
from halfmesh.dry_run.show import lines
from halfmesh.dry_run.simulate_rank import simulate_rank
from halfmesh.dry_run.tracker import Traffic
from tests.support.llama import SMALL


def pipeline(microbatches, schedule="1f1b", size=2, **parallel):
    chunks = {"chunks": 2} if schedule == "interleaved" else {}
    keys = {"size": size, "microbatches": microbatches, "schedule": schedule} | chunks
    return load_config({"parallel": {"pipeline": keys, **parallel}})


def dry_run(config, world_size, model, batch=()):
    """In this process: tests of the command start others."""
    return dry_runs(map, [(config, None)], world_size, model, batch)[0]


@pytest.mark.parametrize(("schedule", "count"), [("1f1b", 10), pytest.param("interleaved", 20, marks=pytest.mark.slow)])
def test_what_is_extrapolated_is_what_is_run(schedule, count):
    """With the fewest microbatches of which not all are run."""
    config, batch = pipeline(count, schedule), (f"{count},32:int64",)
    run = dry_run(config, 2, SMALL, batch)
    assert run.extrapolated is not None
    for rank, said in run.ranks.items():
        whole = simulate_rank(config, SMALL, batch, rank, 2)  # all microbatches
        assert said.peak == pytest.approx(whole.peak, rel=1e-3)
        assert said.kept == pytest.approx(whole.kept, rel=1e-3)
        assert (said.sent, said.rows) == (whole.sent, count)
        for part, size in whole.bytes.items():
            assert said.bytes[part] == pytest.approx(size, rel=1e-2, abs=4096), part


def test_messages():
    """1f1b, 4 microbatches over 2 stages; activations are [2, 32, 64] in fp32, and each block sums two of them over tp
    in its forward and two in its backward."""
    figures = simulate_rank(pipeline(4, tensor=2), SMALL, (), 0, 8)
    block, embedding, compared = 4, 1, 1
    activation = 2 * 32 * 64 * 4
    sent = Traffic(4 + 1, 4 * activation + 16)  # and the loss, from the last stage
    vote = Traffic(sent.messages + 1, sent.bytes + 4)  # torch up to 2.13 takes one before the first batch
    assert figures.sent["pp"] in (sent, vote)
    assert figures.sent["tp"].messages == 4 * (2 * block + embedding) + compared
    assert figures.sent["dp"].messages == 1
    assert figures.sent["dp"].bytes == pytest.approx(figures.parameters * 4, rel=1e-2)


def test_nccls_communicators_are_counted_and_what_they_may_take_is_said_of_gpus():
    """Stages send over a group of their own; the stages' groups in gloo are none of NCCL's."""
    run = dry_run(pipeline(4, tensor=2), 8, SMALL)
    for figures in run.ranks.values():
        assert sorted(figures.communicators) == ["dp", "pp", "pp", "tp", "world"]
    [said] = [line for line in lines(run, None) if "NCCL" in line]
    words = "500.0 MiB to 3.4 GiB, for 5 communicators (world, tp, dp, pp x 2)"
    assert f"NCCL's buffers take another {words}" in said
    assert not any("NCCL" in line for line in lines(run, None, "cpu"))


def test_what_accumulated_batches_send():
    def run(cycle, parallel):
        config = load_config({"parallel": parallel, "gradient_accumulation": cycle})
        return simulate_rank(config, SMALL, (), 0, 4)

    one, three = (run(cycle, {"tensor": 2}).sent for cycle in (1, 3))
    assert three["dp"] == one["dp"]
    assert three["dp"].messages == 1
    assert three["tp"].messages - 1 == (one["tp"].messages - 1) * 3  # one compares gradients, once an update
    figures, more = (run(cycle, {"data": "fsdp"}) for cycle in (1, 3))
    once, three = figures.sent["dp"].bytes, more.sent["dp"].bytes
    gathered = once - 4 * figures.parameters  # of weights, in forward and backward; gradients are sent once
    assert three == pytest.approx(once + 2 * gathered, rel=0.01)


def test_accumulation_that_follows_from_the_global_batch():
    """10 rows on each of 2 data ranks; also where fewer microbatches are run than there are."""
    run = dry_run(pipeline(10).replace(global_batch_size=40), 4, SMALL, ("10,32:int64",))
    assert 2 * 10 < run.ranks[0].sent["pp"].messages < 3 * 10, "an update of two batches"
    rejected = dry_run(pipeline(10).replace(global_batch_size=50), 4, SMALL, ("10,32:int64",))
    assert "global_batch_size: 50 is not a multiple of batch size 10 x 2 data ranks" in rejected.problems[0]


def test_all_kinds_of_ranks():
    run = dry_run(pipeline(4, size=4, tensor=2), 4096, SMALL)
    assert run.problems == []
    assert list(run.ranks) == [0, 2048, 3072]
    assert run.bubble == pytest.approx(3 / 7)
    assert run.rows == 8
    assert run.largest[1].needed == max(figures.peak for figures in run.ranks.values())


# --- models and batches --------------------------------------------------------------------------------------------

MODULE = """
import halfmesh
from torch import nn
from tests.support import llama
MODEL = nn.Linear(2, 2)
def bare(): return llama.small()[0]
def fails(): return 1 / 0
def returns_text(): return "a model"
def no_batch(): return nn.Linear(2, 2), [], nn.MSELoss()
def deferred():
    with halfmesh.deferred_init(): return llama.small()
def one():
    model, (ids, _), _ = llama.small()
    return model, ids
def several():
    model, ids = one()
    return model, [ids, ids[:1]]
def several_pairs():
    model, pair, criterion = llama.small()
    return model, [pair, pair], criterion
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(MODULE)
    (tmp_path / "broken_models.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("others", ["several", "several_pairs", "deferred"])
def test_of_several_batches_the_first_is_taken_and_a_deferred_model_is_as_any_other(models, others):
    one = "my_models:one" if others == "several" else SMALL
    (figures,), (expected,) = (dry_run(load_config({}), 1, m).ranks.values() for m in (f"my_models:{others}", one))
    assert figures.rows == expected.rows == 8
    assert figures.bytes["activations"] == expected.bytes["activations"] > 0
    assert figures.bytes["parameters"] == expected.bytes["parameters"]
    assert figures.peak == pytest.approx(expected.peak, abs=100)


def test_a_model_without_inputs(models):
    run = dry_run(load_config({}), 1, "my_models:bare")
    (figures,) = run.ranks.values()
    assert (figures.peak, figures.sent) == (None, {})
    assert figures.bytes["gradients"] == figures.parameters * 4
    assert figures.bytes["optimizer"] > figures.parameters * 8
    assert "give --batch, or return (model, inputs) from build()" in run.notes[0]
    whole = dry_run(load_config({}), 1, "my_models:bare", ("8,32:int64",))
    assert next(iter(whole.ranks.values())).peak > figures.kept


def wide():
    """8 blocks, whose weights are much larger than their activations."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(8)]
    return nn.Sequential(*blocks), torch.randn(2, 64)


def test_under_fsdp_autocast_keeps_no_casts_of_the_whole_model():
    config = {"bf16": {"mode": "torch"}, "activation_checkpoint": "full", "parallel": {"data": "fsdp"}}
    (figures,) = dry_run(load_config(config), 2, f"{__name__}:wide").ranks.values()
    assert figures.bytes["activations"] < 2 * figures.parameters, "bytes of the model in bf16"


def test_a_model_of_a_library_needs_no_builder(tmp_path):
    pytest.importorskip("timm")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = transformers.LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=16)
    llama.architectures = ["LlamaForCausalLM"]
    llama.save_pretrained(tmp_path)
    vit = transformers.ViTConfig(**sizes, image_size=32, architectures=["ViTForImageClassification"])
    vit.save_pretrained(tmp_path / "vit")
    for model in ("timm:vit_tiny_patch16_224", f"hf:{tmp_path / 'config.json'}", f"hf:{tmp_path / 'vit'}"):
        run = dry_run(load_config({"bf16": {"mode": "naive"}, "activation_checkpoint": "full"}), 1, model)
        assert run.problems == []
        (figures,) = run.ranks.values()
        assert (figures.rows, figures.peak > figures.kept > 0) == (8, True)
    (problem,) = dry_run(load_config({}), 1, "timm:vit_tinny").problems
    (missing,) = dry_run(load_config({}), 1, "hf:nope/config.json").problems
    assert missing == "--model hf:nope/config.json: there is no such file"
    assert "--model timm:vit_tinny: it raised RuntimeError: Unknown model (vit_tinny)" in problem


@pytest.mark.parametrize(
    ("model", "batch", "words"),
    [
        ("my_models", (), "name a function as package.module:function, or a model as timm:NAME or hf:config.json"),
        ("my_model:build", (), "ModuleNotFoundError: No module named 'my_model' (looked for in "),
        ("my_models:bar", (), "my_models.bar does not exist; did you mean 'bare'?"),
        ("my_models:MODEL", (), "my_models.MODEL is not a function"),
        ("my_models:fails", (), "it raised ZeroDivisionError: division by zero ("),
        ("my_models:returns_text", (), "it returned str; return the model"),
        ("my_models:no_batch", (), "it returned (Linear, list, MSELoss); return"),
        ("broken_models:build", (), "importing broken_models raised ZeroDivisionError: division by zero"),
        (SMALL, ("8,2:int46",), "is not a shape and dtype (module 'torch' has no attribute 'int46'); write --batch 8"),
        (SMALL, ("8,64:int64",), "calling the model with [8, 64] int64 raised "),
    ],
)
def test_what_cannot_be_run(models, model, batch, words):
    problems = dry_run(load_config({}), 1, model, batch).problems
    assert any(words in problem for problem in problems), problems


def test_what_is_kept_may_be_too_much_already():
    """Then the update is not simulated, and what is kept is the same."""
    whole = simulate_rank(load_config({}), SMALL, (), 0, 1)
    short = simulate_rank(load_config({}), SMALL, (), 0, 1, limit=whole.kept - 1)
    assert (short.kept, short.peak, short.sent, short.rows) == (whole.kept, None, {}, 8)
    assert simulate_rank(load_config({}), SMALL, (), 0, 1, limit=whole.kept) == whole


SIZES = {"num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}


def inputs():
    ids = torch.zeros(2, 8, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def llama():
    """Looks into positions whether sequences are joined, as it does without a cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False)), inputs()


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2)
    return MixtralForCausalLM(config), inputs()


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("llama", {"parallel": {"context": 2}, "bf16": {"mode": "naive"}}),
        ("mixtral", {"parallel": {"expert": 2}, "bf16": {"mode": "torch"}}),
    ],
)
def test_models_of_transformers_that_run(model, config):
    pytest.importorskip("transformers")
    assert dry_run(load_config(config), 2, f"{__name__}:{model}").problems == []
