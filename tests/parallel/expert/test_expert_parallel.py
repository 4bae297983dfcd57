"""`parallel.expert` through the engine: transformers' own products of experts, checkpoints, and rejections."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh.compat import check
from halfmesh.config.load import load_config
from halfmesh.parallel.axis import PlanInputs
from halfmesh.parallel.expert import ExpertOptions, ExpertParallelism
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

ROWS, LENGTH, WORDS = 4, 6, 32
SIZES = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": WORDS, "num_experts_per_tok": 2, "initializer_range": 0.2}


def make_mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, use_cache=False))


def make_engine(ranks):
    torch.manual_seed(0)
    model = make_mixtral()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = {"clip_grad_norm": 1.0, "parallel": {"expert": ranks}}
    return halfmesh.initialize(model, optimizer, config=config, device=rank_device())


def tokens(seed):
    return here(torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed)))


def train(rank, world_size, folder):
    """Two updates, of each data rank's own rows: losses and norms, and how many experts a layer of this rank had. Then
    logits, and predictions for 3 rows, of which one rank has none in its last batch."""
    engine = make_engine(world_size)
    place, seen = slice(engine.context.dp_rank, None, engine.context.dp_size), []
    for seed in range(2):
        ids = tokens(seed)[place]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        seen.append((loss.item(), engine.step().grad_norm))
    experts = [len(p) for name, p in engine.model.named_parameters() if "experts" in name and "down" in name]
    engine.save(folder)
    ids = tokens(0)
    with torch.no_grad():
        logits = engine.eval()(input_ids=ids).logits  # those of all rows
    predicted = halfmesh.Trainer(engine).predict(torch.utils.data.DataLoader(ids[:3].cpu(), 1)).logits
    return seen, experts[0], logits.cpu(), predicted, close_whole(engine)


@pytest.mark.distributed
def test_products_of_several_experts_at_once_and_checkpoints_that_load_in_one_process(tmp_path):
    """transformers' default, which has no float64: tests/parity has the plain loop."""
    expected, whole, *evaluated, weights = train(0, 1, tmp_path / "one")
    ranks = run_ranks(train, 2, tmp_path / "saved")
    engine = make_engine(1)
    engine.load(tmp_path / "saved")
    loaded = engine.eval()(input_ids=tokens(0)).logits.detach()
    for seen, experts, logits, predicted, theirs in ranks:
        assert experts == whole // 2
        torch.testing.assert_close([norm for _, norm in seen], [norm for _, norm in expected], rtol=1e-5, atol=0)
        torch.testing.assert_close(theirs, weights, rtol=0, atol=1e-5)
        torch.testing.assert_close([logits, predicted], evaluated, rtol=0, atol=1e-4)
        torch.testing.assert_close(logits, loaded, rtol=0, atol=1e-5)
    losses = torch.tensor([[loss for loss, _ in seen] for seen, *_ in ranks]).mean(0).tolist()
    torch.testing.assert_close(losses, [loss for loss, _ in expected], rtol=1e-5, atol=0)


def problems(model, size=2):
    return ExpertParallelism.plan(PlanInputs(model, None, None, None, ExpertOptions(size=size)))[1]


def test_models_that_cannot_be_sharded():
    assert problems(make_mixtral()) == []
    assert "Linear has no expert layer: a module with `num_experts`" in problems(nn.Linear(2, 2))[0]
    odd = problems(make_mixtral(), 3)[0]
    assert "3 does not divide the 4 experts of model.layers.0.mlp.experts: [1, 2, 4] do" in odd


@pytest.mark.parametrize(
    ("config", "ranks", "found"),
    [
        ({"parallel": {"expert": 2}, "compile": True}, 4, {"compile": "cannot send numbers of tokens that change"}),
        ({"parallel": {"expert": 4}}, 2, {"parallel.expert": "4 does not divide the 2 data ranks"}),
        ({"parallel": {"expert": 2, "data": {"strategy": "fsdp", "hybrid": 2}}}, 4, {"parallel.data.hybrid": "expert"}),
    ],
)
def test_what_experts_do_not_compose_with(config, ranks, found):
    findings = {finding.where: finding.message for finding in check(load_config(config), ranks, "cpu")}
    assert findings.keys() == found.keys()
    assert all(message in findings[where] for where, message in found.items())
    assert not dist.is_initialized()
