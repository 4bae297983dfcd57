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


def train(rank, world_size, make, parallel, **config):
    """Two updates: losses, norms, the whole weights, and how many experts a layer of this rank had."""
    engine = make_engine(make, parallel, **config)
    place, seen = slice(engine.context.dp_rank, None, engine.context.dp_size), []
    for seed in range(2):
        ids = tokens(seed)[place]
        engine.zero_grad()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        seen.append((loss.item(), engine.step().grad_norm))
    experts = next(len(p) for name, p in engine.model.named_parameters() if name.endswith("down_proj"))
    return seen, close_whole(engine), experts


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("make", "ranks", "parallel", "config"),
    [
        pytest.param(make_mixtral, 4, {"expert": 4}, {}, id="Mixtral"),
        pytest.param(one_by_one, 2, {"expert": 2}, {}, id="Mixtral, one expert after the other"),
        pytest.param(make_qwen, 2, {"expert": 2}, {}, id="Qwen"),
        pytest.param(make_mixtral, 4, {"expert": 2, "tensor": 2}, {}, id="tensor"),
        pytest.param(make_qwen, 4, {"expert": 2, "data": "fsdp"}, {}, id="fsdp"),
        pytest.param(make_mixtral, 2, {"expert": 2}, {"activation_checkpoint": "full"}, id="recomputed"),
        pytest.param(partial(favouring, 2), 4, {"expert": 4}, {}, id="ranks without tokens"),
        pytest.param(partial(favouring, 1), 2, {"expert": 2}, {}, id="one expert for all"),
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


def criterion(output, target):
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def criterion_losses(rank, world_size):
    engine = make_engine(make_mixtral, {"expert": world_size} if world_size > 1 else {}, criterion)
    target = tokens(1)
    target[: ROWS // 2] = -100  # no row of the first rank counts
    loss = engine.criterion(engine(input_ids=tokens(0)), target)
    engine.backward(loss)
    return loss.item(), engine.step().grad_norm


def weighted(rank, world_size):
    engine = make_engine(
        make_mixtral,
        {"expert": 2},
        lambda output, target: F.mse_loss(output.logits.float().mean((1, 2)), target, weight=target),
    )
    return said(lambda: engine.criterion(engine(input_ids=tokens(0)), here(torch.arange(1.0, ROWS + 1))))


@pytest.mark.distributed
def test_a_mean_by_weights_of_each_rank_is_refused():
    for message in run_ranks(weighted, 2):
        assert "with parallel.expert a loss of two tensors cannot be a mean by `weight`" in message


@pytest.mark.distributed
def test_a_criterion_takes_whole_batches():
    expected = criterion_losses(0, 1)
    for found in run_ranks(criterion_losses, 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


# -- what is refused ---------------------------------------------------------------------------------------------------


def router_losses(rank, world_size):
    engine = make_engine(partial(make_mixtral, output_router_logits=True), {"expert": 2})
    with pytest.raises(halfmesh.InputError) as caught:
        engine.backward(engine(input_ids=tokens(0), labels=tokens(0)).loss)
    return str(caught.value)


@pytest.mark.distributed
def test_the_router_loss_of_each_ranks_own_tokens_is_refused():
    for message in run_ranks(router_losses, 2):
        assert "with parallel.expert the model returns something else" in message


class Centred(nn.Module):
    """Combines the rows of a batch."""

    def __init__(self):
        super().__init__()
        self.inner = make_mixtral()

    def forward(self, input_ids):
        logits = self.inner(input_ids=input_ids).logits
        return logits - logits.mean(0)


def centred(rank, world_size):
    engine = make_engine(Centred, {"expert": 2})
    with pytest.raises(halfmesh.InputError, match="Rows may not be combined with each other"):
        engine(tokens(0))


@pytest.mark.distributed
def test_models_that_combine_rows_are_refused():
    run_ranks(centred, 2)


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


def odd_rows(rank, world_size):
    engine = make_engine(make_mixtral, {"expert": 2})
    with torch.no_grad():
        assert engine.eval()(input_ids=tokens(0)[:3]).logits.shape[0] == 3, "evaluated whole by each rank"
    engine.train()
    with pytest.raises(halfmesh.InputError, match=r"a batch of 3 rows cannot be sharded over expert=2 ranks.* to 4"):
        engine(input_ids=tokens(0)[:3])


@pytest.mark.distributed
def test_rows_that_the_ranks_do_not_divide_are_refused():
    run_ranks(odd_rows, 2)


def problems(model, size=2):
    inputs = PlanInputs(model, None, None, None, ExpertOptions(size=size))
    return ExpertParallelism.plan(inputs)[1]


def test_models_that_cannot_be_sharded():
    assert problems(make_mixtral()) == []
    assert "Linear has no layer of experts: a module with `num_experts`" in problems(nn.Linear(2, 2))[0]
    assert "has 4 experts, which 3 does not divide" in problems(make_mixtral(), 3)[0]
    normed = make_mixtral()
    normed.norm = nn.BatchNorm1d(4)
    assert "the rows of a batch are combined in norm (BatchNorm)" in problems(normed)[0]


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"parallel": {"context": 2}}, "parallel.context"),
        ({"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}, "parallel.pipeline"),
        ({"compile": True}, "compile"),
    ],
)
def test_what_experts_do_not_compose_with(more, where):
    config = {**more, "parallel": {"expert": 2, **more.get("parallel", {})}}
    assert [finding.where for finding in check(load_config(config), 4, "cpu")] == [where]
    assert not dist.is_initialized()
