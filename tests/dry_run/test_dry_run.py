"""A dry run: what each kind of rank holds and sends, and what it rejects."""

from __future__ import annotations

import pytest
import torch

from halfmesh import load_config
from halfmesh.dry_run import dry_run as whole
from halfmesh.dry_run.show import lines
from halfmesh.dry_run.simulate_rank import simulate_rank
from halfmesh.dry_run.tracker import Traffic
from tests.support.llama import SMALL


def pipeline(microbatches, size=2, **parallel):
    return load_config({"parallel": {"pipeline": {"size": size, "microbatches": microbatches}, **parallel}})


def dry_run(config, world_size, model, batch=()):
    """In this process: tests of the command start others."""
    return whole.dry_run(map, config, world_size, model, batch)


def test_what_is_extrapolated_is_what_is_run():
    """With the fewest microbatches of which not all are run."""
    config, batch = pipeline(10), ("10,32:int64",)
    run = dry_run(config, 2, SMALL, batch)
    assert run.extrapolated is not None
    for rank, said in run.ranks.items():
        full = simulate_rank(config, SMALL, batch, rank, 2)  # all microbatches
        assert (said.peak, said.kept) == pytest.approx((full.peak, full.kept), rel=1e-3)
        assert (said.sent, said.rows) == (full.sent, 10)
        for part, size in full.bytes.items():
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
    (said,) = [line for line in lines(run, None) if "NCCL" in line]
    assert "take another 500.0 MiB to 3.4 GiB, for the communicators of world, tp, dp, pp, pp" in said
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


def test_all_kinds_of_ranks():
    run = dry_run(pipeline(4, size=4, tensor=2), 4096, SMALL)
    assert (run.problems, list(run.ranks), run.rows) == ([], [0, 2048, 3072], 8)
    assert run.bubble == pytest.approx(3 / 7)
    assert run.largest[1].needed == max(figures.peak for figures in run.ranks.values())


MODULE = """
import halfmesh
from torch import nn
from tests.support import llama
def bare(): return llama.small()[0]
def fails(): return 1 / 0
def no_pair(): return nn.Linear(2, 2), 1, nn.MSELoss()
def deferred():
    with halfmesh.deferred_init(): return llama.small()
def several_pairs():
    model, pair, criterion = llama.small()
    return model, [pair, pair], criterion
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("others", ["several_pairs", "deferred"])
def test_of_several_batches_the_first_is_taken_and_a_deferred_model_is_as_any_other(models, others):
    (figures,), (expected,) = (dry_run(load_config({}), 1, m).ranks.values() for m in (f"my_models:{others}", SMALL))
    for part in ("activations", "parameters"):
        assert figures.bytes[part] == expected.bytes[part] > 0


def test_a_model_without_inputs(models):
    run = dry_run(load_config({}), 1, "my_models:bare")
    (figures,) = run.ranks.values()
    assert (figures.peak, figures.sent, figures.bytes["gradients"]) == (None, {}, figures.parameters * 4)
    assert figures.bytes["optimizer"] > figures.parameters * 8
    given = dry_run(load_config({}), 1, "my_models:bare", ("8,32:int64",))
    assert next(iter(given.ranks.values())).peak > figures.kept


def test_a_model_of_a_library_needs_no_builder(tmp_path):
    pytest.importorskip("timm")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = transformers.LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=16)
    llama.architectures = ["LlamaForCausalLM"]
    llama.save_pretrained(tmp_path)
    for model in ("timm:vit_tiny_patch16_224", f"hf:{tmp_path / 'config.json'}"):
        run = dry_run(load_config({"bf16": {"mode": "naive"}, "activation_checkpoint": "full"}), 1, model)
        assert run.problems == []
        (figures,) = run.ranks.values()
        assert (figures.rows, figures.peak > figures.kept > 0) == (8, True)
    (missing,) = dry_run(load_config({}), 1, "hf:nope/config.json").problems
    assert missing == "--model hf:nope/config.json: there is no such file"


@pytest.mark.parametrize(
    ("model", "batch", "words"),
    [
        ("my_models", (), "name a function as package.module:function, or a model as timm:NAME or hf:config.json"),
        ("my_model:build", (), "ModuleNotFoundError: No module named 'my_model' (looked for in "),
        ("my_models:fails", (), "it raised ZeroDivisionError: division by zero ("),
        ("my_models:no_pair", (), "it returned Linear, int, MSELoss; return"),
        (SMALL, ("8,2:int46",), "is not a shape and dtype (module 'torch' has no attribute 'int46'); write --batch 8"),
        (SMALL, ("8,64:int64",), "--model: 'blocks.0.attention' (Attention) raised RuntimeError: "),
    ],
)
def test_what_cannot_be_run(models, model, batch, words):
    problems = dry_run(load_config({}), 1, model, batch).problems
    assert any(words in problem for problem in problems), problems


def test_a_layout_that_does_not_fit_the_model():
    (problem, *_) = dry_run(pipeline(3, size=3, tensor=3), 9, SMALL).problems
    assert "does not divide the dataloader's batch_size=8" in problem


def test_what_is_kept_may_be_too_much_already():
    """Then the update is not simulated, and what is kept is the same."""
    full = simulate_rank(load_config({}), SMALL, (), 0, 1)
    short = simulate_rank(load_config({}), SMALL, (), 0, 1, limit=full.kept - 1)
    assert (short.kept, short.peak, short.sent, short.rows) == (full.kept, None, {}, 8)


def transformers_model(name, **sizes):
    transformers = pytest.importorskip("transformers")
    sizes |= {"num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = getattr(transformers, f"{name}Config")(**sizes, vocab_size=16, use_cache=False)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    return getattr(transformers, f"{name}ForCausalLM")(config), {"input_ids": ids, "labels": ids}


def llama():  # looks into positions whether sequences are joined
    return transformers_model("Llama")


def mixtral():  # multiplies groups of rows in fp32
    return transformers_model("Mixtral", num_key_value_heads=2, num_local_experts=2)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("llama", {"parallel": {"context": 2}, "bf16": {"mode": "naive"}}),
        ("mixtral", {"bf16": {"mode": "torch"}}),
        ("mixtral", {"parallel": {"expert": 2}}),
    ],
)
def test_models_of_transformers_that_run(model, config):
    pytest.importorskip("transformers")
    assert dry_run(load_config(config), 2, f"{__name__}:{model}").problems == []
