"""`parallel.expert` through the engine: transformers' own products of experts, state, evaluation, and rejections."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfmesh
from halfmesh.compat import check
from halfmesh.config.load import load_config
from halfmesh.parallel.axis import PlanInputs
from halfmesh.parallel.expert import ExpertOptions, ExpertParallelism, dispatch
from tests.support.models import said
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

ROWS, LENGTH, WORDS = 4, 6, 32
SIZES = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": WORDS, "num_experts_per_tok": 2, "initializer_range": 0.2}


def make_mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, use_cache=False))


def make_qwen():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, use_cache=False))


def make_engine(make, ranks, **config):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = {"clip_grad_norm": 1.0, "parallel": {"expert": ranks} if ranks > 1 else {}, **config}
    return halfmesh.initialize(model, optimizer, config=config, device=rank_device())


def tokens(seed):
    return here(torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed)))


def train(rank, world_size, make):
    """Two updates, of each data rank's own rows: losses, norms, the whole weights, and how many experts a layer of this
    rank had."""
    engine = make_engine(make, world_size)
    place, seen = slice(engine.context.dp_rank, None, engine.context.dp_size), []
    for seed in range(2):
        ids = tokens(seed)[place]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        seen.append((loss.item(), engine.step().grad_norm))
    experts = [len(p) for name, p in engine.model.named_parameters() if "experts" in name and "down" in name]
    return seen, close_whole(engine), experts[0]


@pytest.mark.distributed
@pytest.mark.parametrize("make", [make_mixtral, make_qwen])
def test_products_of_several_experts_at_once(make):
    """transformers' default, which has no float64: tests/parity has the plain loop."""
    expected, weights, whole = train(0, 1, make)
    found = run_ranks(train, 2, make)
    for seen, theirs, experts in found:
        assert experts == whole // 2
        torch.testing.assert_close([norm for _, norm in seen], [norm for _, norm in expected], rtol=1e-5, atol=0)
        torch.testing.assert_close(theirs, weights, rtol=0, atol=1e-5)
    losses = torch.tensor([[loss for loss, _ in seen] for seen, *_ in found]).mean(0).tolist()
    torch.testing.assert_close(losses, [loss for loss, _ in expected], rtol=1e-5, atol=0)


class Doubling(nn.Module):
    """Experts that multiply by 1, 2, 3, 4."""

    num_experts = 2

    def forward(self, rows, kinds, weights):
        return rows * (kinds + 1 + 2 * dist.get_rank())


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def sum_experts(rank, world_size):
    """What a token of 1 feature gets from its experts, and the operators that computed it."""
    kinds = here(torch.tensor([[3, 0], [1, 2], [0, 3]]))
    weights = here(torch.tensor([[0.5, 0.25], [1.0, 2.0], [0.25, 0.5]]))
    rows = here(torch.tensor([[1.0], [10.0], [100.0]]) + rank).requires_grad_()
    layer = Doubling()
    with Operators() as operators:
        found = dispatch(layer, layer, SimpleNamespace(group=dist.group.WORLD), rows, kinds, weights)
        found.sum().backward()
    return found.tolist(), rows.grad.tolist(), operators.seen


@pytest.mark.distributed
def test_the_experts_of_a_token_are_summed_in_a_fixed_order():
    """On CUDA `index_add_` adds in the order in which threads arrive: two runs differ."""
    for rank, (found, grads, seen) in enumerate(run_ranks(sum_experts, 2)):
        factors = [[4 * 0.5 + 0.25], [2 * 1.0 + 3 * 2.0], [0.25 + 4 * 0.5]]
        assert found == [[f * (row + rank)] for (f,), row in zip(factors, (1, 10, 100), strict=True)]
        assert grads == factors
        assert not [name for name in seen if "index_add" in name or "scatter_add" in name]


def saved(rank, world_size, folder):
    engine = make_engine(make_mixtral, world_size)
    ids = tokens(0)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save(folder)
    with torch.no_grad():
        logits = engine.eval()(input_ids=ids).logits  # those of all rows
        average = copy.deepcopy(engine.model)(input_ids=ids).logits  # a copy of the model, called by itself
    return logits, average


@pytest.mark.distributed
def test_checkpoints_load_in_one_process(tmp_path):
    for logits, average in run_ranks(saved, 2, tmp_path / "saved"):
        engine = make_engine(make_mixtral, 1)
        engine.load(tmp_path / "saved")
        expected = engine.eval()(input_ids=tokens(0)).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(average, expected, rtol=0, atol=1e-5)


def states(rank, world_size):
    """What is said of another rank's state, of this rank's own, and of the closed engine's model."""
    engine = make_engine(make_mixtral, world_size, debug="sync")  # which finds nothing
    for seed in range(2):
        engine.backward(engine(input_ids=tokens(seed), labels=tokens(seed)).loss)
        engine.step()
    mine = engine.state_dict()
    theirs = [None] * world_size
    dist.all_gather_object(theirs, mine)
    engine.load_state_dict(mine)
    found = said(engine.load_state_dict, theirs[1 - rank])
    engine.close()
    return found, said(halfmesh.initialize, engine.model, engine.optimizer, config={}, device=rank_device())


@pytest.mark.distributed
def test_another_ranks_state_is_rejected():
    for rank, (message, again) in enumerate(run_ranks(states, 2)):
        assert f"ep_rank {1 - rank}, tp_size 1, tp_rank 0, but this rank is" in message
        assert "holds only a part" in again


def evaluated(rank, world_size):
    """Predictions for 3 rows, of which one rank has none in its last batch."""
    with make_engine(make_mixtral, world_size) as engine:
        return halfmesh.Trainer(engine).predict(torch.utils.data.DataLoader(tokens(0)[:3].cpu(), 1)).logits


@pytest.mark.distributed
def test_an_evaluation_in_which_some_ranks_have_fewer_batches():
    expected = evaluated(0, 1)
    for found in run_ranks(evaluated, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def problems(model, size=2):
    inputs = PlanInputs(model, None, None, None, ExpertOptions(size=size))
    return ExpertParallelism.plan(inputs)[1]


def test_models_that_cannot_be_sharded():
    assert problems(make_mixtral()) == []
    assert "Linear has no expert layer: a module with `num_experts`" in problems(nn.Linear(2, 2))[0]
    odd = problems(make_mixtral(), 3)[0]
    assert "3 does not divide the 4 experts of model.layers.0.mlp.experts; use one of 1, 2, 4" in odd


@pytest.mark.parametrize(
    ("config", "ranks", "found"),
    [
        ({"parallel": {"expert": 2}, "compile": True}, 4, {"compile": "tokens sent change from"}),
        ({"parallel": {"expert": 4}}, 2, {"parallel.expert": "4 does not divide the 2 data ranks"}),
        (
            {"parallel": {"expert": 4, "data": {"size": 2}}},
            8,
            {"parallel.data.size": "there are 8 ranks; remove it, or start 2 (data.size includes the expert ranks"},
        ),
        ({"parallel": {"expert": 2, "data": {"strategy": "fsdp", "hybrid": 2}}}, 4, {"parallel.data.hybrid": "expert"}),
    ],
)
def test_what_experts_do_not_compose_with(config, ranks, found):
    findings = {finding.where: finding.message for finding in check(load_config(config), ranks, "cpu")}
    assert findings.keys() == found.keys()
    assert all(message in findings[where] for where, message in found.items())
    assert not dist.is_initialized()
