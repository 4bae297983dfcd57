"""engine.full_state_dict: the whole model and its optimizer, from every layout, as a plain process takes them."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import halfmesh
from tests.support.ranks import here, rank_device, run_ranks

WIDTH = 8
PIPE = {"size": 2, "microbatches": 2, "schedule": "interleaved", "chunks": 2}
PLAN = {"size": 2, "plan": {"*.0": "colwise", "*.2": "rowwise"}}
LAYOUTS = {"zero1": {"data": "zero1"}, "fsdp": {"data": "fsdp"}, "tensor": {"tensor": PLAN}, "pipe": {"pipeline": PIPE}}
TOLERANCES = {"rtol": 2e-2, "atol": 2e-3}
X = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))


def make_model():
    """Tied weights at both ends, a buffer, and one that is not saved."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)) for _ in range(4)]
    blocks[3][0].weight = blocks[0][0].weight
    blocks[0].register_buffer("by", torch.tensor([0.1]))
    blocks[0].register_buffer("passing", torch.tensor([1.0]), persistent=False)
    return nn.Sequential(*blocks)


def adamw(model):
    """The last parameters come first, and the groups differ. With this eps an update is smooth in the gradient."""
    params = list(model.parameters())[::-1]
    decayed, others = [p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.3}], lr=0.5, eps=1.0)


def train(model, optimizer, xs):
    for x in xs:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()


def gather(rank, world_size):
    """What rank 0, and what each rank gets of an engine that was trained, by layout."""
    found = {}
    for layout, parallel in LAYOUTS.items():
        model = make_model()
        config = {"parallel": parallel, "bf16": {"mode": "naive"}}
        engine = halfmesh.initialize(model, adamw(model), nn.MSELoss(), config=config, device=rank_device())
        size, rank = engine.context.dp_size, engine.context.dp_rank
        for x in here(X):
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x.chunk(size)[rank]), x.chunk(size)[rank]))
            engine.step()
        full = engine.full_state_dict(optimizer=True)
        found[layout] = engine.full_state_dict(), full, engine.full_state_dict(optimizer=True, rank0_only=False)
        engine.close()
    return found


@pytest.mark.promise(
    "whole weights from a sharded model",
    "`engine.full_state_dict`, `engine.save_pretrained`",
    of="SageMaker",
    page="checkpoints.md",
)
@pytest.mark.sends
@pytest.mark.distributed
def test_it_is_that_of_one_process():
    first, other = run_ranks(gather, 2, timeout=120)
    for layout, (weights, full, everywhere) in first.items():
        expected = make_model()
        optimizer = adamw(expected)
        train(expected, optimizer, X)
        assert sorted(weights) == sorted(expected.state_dict()), layout
        assert weights["3.0.weight"] is weights["0.0.weight"], "tied weights stay tied"
        assert {value.dtype for value in weights.values()} == {torch.float32}
        torch.testing.assert_close(weights, dict(expected.state_dict()), **TOLERANCES)
        torch.testing.assert_close(full["model"], weights, rtol=0, atol=0)
        *nothing, theirs = other[layout]
        assert nothing == [{}, {}], layout
        for same in (everywhere, theirs):
            assert same["optimizer"]["param_groups"] == full["optimizer"]["param_groups"]
            tensors = [(each["model"], each["optimizer"]["state"]) for each in (same, full)]
            torch.testing.assert_close(*tensors, rtol=0, atol=0)
        model = make_model()
        loaded = adamw(model)
        model.load_state_dict(full["model"])
        set_optimizer_state_dict(model, loaded, full["optimizer"])
        train(model, loaded, X.flip(0))  # it goes on, with the state of each parameter and the settings of each group
        train(expected, optimizer, X.flip(0))
        torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()), **TOLERANCES)
