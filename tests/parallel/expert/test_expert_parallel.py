"""`parallel.expert` through the engine: one process's losses, norms and weights, or a message."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import halfmesh
from halfmesh.compat import check
from halfmesh.config.load import load_config
from halfmesh.parallel.axis import PlanInputs
from halfmesh.parallel.expert import ExpertOptions, ExpertParallelism
from halfmesh.verify.models import mixture
from tests.support.models import said
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

ROWS, LENGTH, WORDS = 4, 6, 32
SIZES = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": WORDS, "num_experts_per_tok": 2, "initializer_range": 0.2}


def make_mixtral(**options):
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, use_cache=False, **options))


def make_qwen():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, use_cache=False))


def one_by_one():
    """transformers' plain loop over experts."""
    model = make_mixtral()
    model.config._experts_implementation = "eager"
    return model


class Adapter(nn.Module):
    """Of a layer of experts, which is frozen: a product of low rank for each, and itself such a layer."""

    def __init__(self, base):
        super().__init__()
        self.base, self.num_experts = base, base.num_experts
        count, out, _ = base.down_proj.shape
        self.a = nn.Parameter(torch.randn(count, 2, out) * 0.1)
        self.b = nn.Parameter(torch.randn(count, out, 2) * 0.1)
        base.requires_grad_(False)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        inner = torch.einsum("tkri,ti->tkr", self.a[top_k_index], hidden_states)
        low = torch.einsum("tkor,tkr->tko", self.b[top_k_index], inner)
        return self.base(hidden_states, top_k_index, top_k_weights) + (low * top_k_weights[..., None]).sum(1)


def adapted():
    model = make_mixtral()
    for block in model.model.layers:
        block.mlp.experts = Adapter(block.mlp.experts)
    return model


def favouring(count):
    """All tokens go to the first `count` experts, so that a rank may have none. (Of no tokens the plain loop returns
    zeros without a graph.)"""
    model = one_by_one()
    for block in model.model.layers:
        gate, inner = block.mlp.gate, block.mlp.gate.forward

        def forward(hidden, inner=inner, gate=gate):
            logits, scores, chosen = inner(hidden)
            return logits, scores, chosen % count if count > 1 else chosen * 0

        gate.forward = forward
    return model


def make_engine(make, parallel, criterion=None, **config):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = {"clip_grad_norm": 1.0, "parallel": parallel, **config}
    return halfmesh.initialize(model, optimizer, criterion, config=config, device=rank_device())


def tokens(seed):
    return here(torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed)))


def criterion(output, target):
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def train(rank, world_size, make, parallel, **config):
    """Two updates, of each data rank's own rows: losses, norms, the whole weights, and how many experts a layer of this
    rank had."""
    engine = make_engine(make, parallel, criterion, **config)
    place, seen = slice(engine.context.dp_rank, None, engine.context.dp_size), []
    for seed in range(2):
        ids, target = tokens(seed)[place], tokens(seed + 2)[place]
        engine.zero_grad()
        loss = engine.criterion(engine(ids), target)
        engine.backward(loss)
        seen.append((loss.item(), engine.step().grad_norm))
    experts = [len(p) for name, p in engine.model.named_parameters() if "experts" in name and "down" in name]
    return seen, close_whole(engine), next(iter(experts))


def layout(data=None, **axes):
    return {**axes, **({"data": data} if data else {})}


STAGES = {"size": 2, "microbatches": 2, "partition": ("blocks.2",)}


def make_mixture():
    """With layers of experts on both stages."""
    return mixture()[0]


@pytest.mark.promise(
    "mixture-of-experts layers larger than a device holds",
    "experts are sharded; losses, norms and weights are those of one process",
    of="SageMaker",
    page="expert-parallel.md",
)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("make", "ranks", "parallel", "config"),
    [
        pytest.param(make_mixtral, 4, layout(expert=4), {}, id="Mixtral"),
        pytest.param(make_mixtral, 4, layout(expert=2), {}, id="two groups"),
        pytest.param(one_by_one, 2, layout(expert=2), {}, id="Mixtral, one expert after the other"),
        pytest.param(make_qwen, 2, layout(expert=2), {}, id="Qwen"),
        pytest.param(adapted, 2, layout(expert=2), {}, id="adapters"),
        pytest.param(make_mixtral, 4, layout(expert=2, tensor=2), {}, id="tensor"),
        pytest.param(make_mixtral, 4, layout(expert=2, context=2), {}, id="context"),
        pytest.param(make_mixture, 4, layout(expert=2, pipeline=STAGES), {}, id="pipeline"),
        pytest.param(make_mixtral, 4, layout("zero1", expert=2), {}, id="zero1, two groups"),
        pytest.param(make_qwen, 2, layout("fsdp", expert=2), {}, id="fsdp"),
        pytest.param(make_mixtral, 4, layout("fsdp", expert=2), {}, id="fsdp, two groups"),
        pytest.param(make_mixtral, 2, layout(expert=2), {"activation_checkpoint": "full"}, id="recomputed"),
        pytest.param(partial(favouring, 2), 4, layout(expert=4), {}, id="ranks without tokens"),
        pytest.param(partial(favouring, 1), 2, layout(expert=2), {}, id="one expert for all"),
    ],
)
def test_parity(make, ranks, parallel, config):
    expected, weights, whole = train(0, 1, make, {}, **config)
    found = run_ranks(train, ranks, make, parallel, **config)
    for seen, theirs, experts in found:
        assert experts == whole // parallel["expert"]
        assert [norm for _, norm in seen] == [norm for _, norm in found[0][0]], "exactly equal on all ranks"
        torch.testing.assert_close([norm for _, norm in seen], [norm for _, norm in expected], rtol=1e-5, atol=0)
        torch.testing.assert_close(theirs, weights, rtol=0, atol=1e-5)
    losses = torch.tensor([[loss for loss, _ in seen] for seen, *_ in found]).mean(0).tolist()
    torch.testing.assert_close(losses, [loss for loss, _ in expected], rtol=1e-5, atol=0)


def saved(rank, world_size, folder):
    engine = make_engine(make_mixtral, {"expert": world_size} if world_size > 1 else {})
    ids = tokens(0)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save(folder)
    with torch.no_grad():
        logits = engine.eval()(input_ids=ids).logits  # those of all rows
        average = copy.deepcopy(engine.model)(input_ids=ids).logits  # a copy of the model, called by itself
    return logits, average


@pytest.mark.promise("mixture-of-experts layers larger than a device holds")
@pytest.mark.distributed
def test_checkpoints_load_in_one_process(tmp_path):
    for logits, average in run_ranks(saved, 2, tmp_path / "saved"):
        engine = make_engine(make_mixtral, {})
        engine.load(tmp_path / "saved")
        expected = engine.eval()(input_ids=tokens(0)).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(average, expected, rtol=0, atol=1e-5)


def states(rank, world_size, parallel):
    """What is said of another rank's state, and of this rank's own."""
    engine = make_engine(make_mixtral, parallel, debug="sync")
    for seed in range(2):
        loss = engine(input_ids=tokens(seed), labels=tokens(seed)).loss
        engine.backward(loss)
        engine.step()
    mine = engine.state_dict()
    theirs = [None] * world_size
    dist.all_gather_object(theirs, mine)
    engine.load_state_dict(mine)
    found = said(engine.load_state_dict, theirs[1 - rank])
    engine.close()
    again = said(halfmesh.initialize, engine.model, engine.optimizer, config={}, device=rank_device())
    assert ("holds a part of it for another engine" in again) == ("expert" in parallel)
    return found


@pytest.mark.distributed
def test_another_ranks_state_is_refused_where_experts_are_sharded_and_debug_sync_finds_nothing():
    for rank, message in enumerate(run_ranks(states, 2, {"expert": 2})):
        assert f"ep_rank {1 - rank}, tp_size 1, tp_rank 0, and this rank is" in message
    assert run_ranks(states, 2, {"context": 2}) == ["nothing", "nothing"]  # whose ranks hold the same


def only_experts(rank, world_size):
    """Only experts are trained, and no token comes to those of the second rank."""
    torch.manual_seed(0)
    model = favouring(2)
    for name, param in model.named_parameters():
        param.requires_grad_("experts" in name)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    config = {"parallel": {"expert": world_size} if world_size > 1 else {}, "timeout": 20.0}
    engine = halfmesh.initialize(model, optimizer, criterion, config=config, device=rank_device())
    place = slice(engine.context.dp_rank, None, engine.context.dp_size)
    engine.backward(engine.criterion(engine(input_ids=tokens(0)[place]), tokens(1)[place]))
    engine.step()
    return close_whole(engine)


@pytest.mark.distributed
def test_a_rank_whose_experts_get_no_token_takes_part_in_backward():
    expected = only_experts(0, 1)
    for found in run_ranks(only_experts, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# -- what is refused ---------------------------------------------------------------------------------------------------


def penalised(rank, world_size):
    """Of experts, and of what all ranks hold."""
    engine = make_engine(make_mixtral, {"expert": world_size} if world_size > 1 else {}, clip_grad_norm=0.0)
    held = [p for n, p in engine.model.named_parameters() if "gate_up_proj" in n or "embed" in n or "q_proj" in n]
    loss = engine(input_ids=tokens(0), labels=tokens(0)).loss
    engine.backward(loss + 0.01 * sum((param - param.detach() + 1).sum() for param in held))  # the same everywhere
    engine.step()
    return close_whole(engine)


@pytest.mark.distributed
def test_a_penalty_on_weights():
    expected = penalised(0, 1)
    for found in run_ranks(penalised, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def evaluated(rank, world_size):
    """Predictions for 3 rows, of which one rank has none in its last batch."""
    with make_engine(make_mixtral, {"expert": world_size} if world_size > 1 else {}) as engine:
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
    assert "Linear has no layer of experts: a module with `num_experts`" in problems(nn.Linear(2, 2))[0]
    odd = problems(make_mixtral(), 3)[0]
    assert "3 does not divide the 4 experts of model.layers.0.mlp.experts; use one of 1, 2, 4" in odd


@pytest.mark.parametrize(
    ("config", "ranks", "found"),
    [
        ({"parallel": {"expert": 2}, "compile": True}, 4, {"compile": "tokens are sent in numbers"}),
        ({"parallel": {"expert": 4}}, 2, {"parallel.expert": "4 does not divide the 2 of them"}),
        (
            {"parallel": {"expert": 4, "data": {"size": 2}}},
            8,
            {"parallel.data.size": "there are 8 ranks; remove it, or start 2 (expert ranks are data ranks"},
        ),
        ({"parallel": {"expert": 2, "data": {"strategy": "fsdp", "hybrid": 2}}}, 4, {"parallel.data.hybrid": "expert"}),
    ],
)
def test_what_experts_do_not_compose_with(config, ranks, found):
    findings = {finding.where: finding.message for finding in check(load_config(config), ranks, "cpu")}
    assert findings.keys() == found.keys()
    assert all(message in findings[where] for where, message in found.items())
    assert not dist.is_initialized()
