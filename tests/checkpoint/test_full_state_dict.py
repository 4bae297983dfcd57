"""engine.full_state_dict: the whole model and its optimizer, from every layout, as a plain process takes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.checkpoint_runs import Net, differing, make_engine, make_small, train, weights
from tests.support.models import make_data
from tests.support.ranks import here, run_ranks
from tests.support.whole import load_full

LAYOUTS = ("zero1", "fsdp", "tp2", "pp2")


class Tied(Net):
    """Two layers share a weight, and a buffer is not saved."""

    def __init__(self, seed=0):
        super().__init__(seed=seed, norm=nn.LayerNorm)
        self.frozen.weight = self.again.weight
        self.register_buffer("passing", torch.ones(1), persistent=False)


def adamw(params):
    """The last parameters come first, and the groups differ. With this eps an update is smooth in the gradient."""
    params = list(params)[::-1]
    decayed, others = [p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.3}], lr=0.5, eps=1.0)


def gather(rank, world_size):
    """What rank 0, and what each rank gets of an engine that was trained; and where it goes then, by layout."""
    found = {}
    for layout in LAYOUTS:
        engine = make_engine(layout, "naive", model=Tied(), optimizer=adamw)
        train(engine, 2)
        full = engine.full_state_dict(optimizer=True)
        gathered = engine.full_state_dict(), full, engine.full_state_dict(optimizer=True, rank0_only=False)
        x, y = (part.chunk(engine.context.dp_size)[engine.context.dp_rank] for part in here(make_data(8)))
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        found[layout] = *gathered, engine.full_state_dict(rank0_only=False)
        engine.close()
    return found


@pytest.mark.promise(
    "the whole model's state in memory",
    "lifted: `engine.full_state_dict` gathers it from any layout, with the optimizer's if asked, on rank 0 or on all",
    of="SageMaker",
    page="checkpoints.md",
)
@pytest.mark.sends
@pytest.mark.distributed
def test_a_plain_process_goes_on_from_it():
    first, other = run_ranks(gather, 2, timeout=120)
    alone = make_engine("one", "naive", model=Tied(), optimizer=adamw)
    train(alone, 2)
    for layout, (whole, full, everywhere, later) in first.items():
        assert sorted(whole) == sorted(Tied().state_dict()), layout
        assert whole["again.weight"] is whole["frozen.weight"], "tied weights stay tied"
        assert {value.dtype for value in whole.values()} == {torch.float32}
        torch.testing.assert_close(whole, weights(alone), rtol=2e-3, atol=2e-3)
        *nothing, theirs, _ = other[layout]
        assert nothing == [{}, {}], layout
        for same in (everywhere, theirs):
            assert differing(same["model"], whole) == []
            assert same["optimizer"]["param_groups"] == full["optimizer"]["param_groups"]
            torch.testing.assert_close(same["optimizer"]["state"], full["optimizer"]["state"], rtol=0, atol=0)
        model = Tied(seed=1)
        loaded = adamw(model.parameters())
        load_full(full, model, loaded)
        x, y = make_data(8)
        nn.functional.cross_entropy(model(x), y).backward()
        loaded.step()  # with the state of each parameter and the settings of each group
        torch.testing.assert_close(dict(model.state_dict()), later, rtol=2e-3, atol=2e-3)


def test_it_is_a_copy_and_without_an_optimizer_nothing_is_said_of_its_state():
    engine = make_small(optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    whole, before = engine.full_state_dict(), weights(engine)
    with torch.no_grad():
        for param in engine.model.parameters():
            param.add_(1)
    assert differing(whole, before) == []
    engine.optimizer.state[engine.model.head.weight]["odd"] = object()
    engine.full_state_dict()
    engine.close()
    with pytest.raises(halfmesh.InputError, match="this engine is closed"):
        engine.full_state_dict()
