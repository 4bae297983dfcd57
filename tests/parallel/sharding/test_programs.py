"""Models and loops that could train otherwise under zero1 and fsdp than with replicated weights."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import halfmesh
from halfmesh.errors import InputError
from tests.support.models import said
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.sharding import MODES, all_equal, differences, make_engine, whole
from tests.support.whole import close_whole

pytestmark = pytest.mark.distributed
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)  # of the same size
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, which=None, bias=None):
        x = self.norm(x)
        x = x + self.other(x) if which else x + self.one(x)
        return x if bias is None else x + bias.sin().to(x.dtype).mean()


class Net(nn.Module):
    def __init__(self, tie: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.end = nn.Linear(WIDTH, WIDTH)
        self.table = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(0))])
        if tie == "blocks":
            self.blocks[0].one.weight = self.blocks[2].one.weight
        elif tie == "root":
            self.end.weight = self.blocks[1].one.weight
        elif tie == "columns":  # of a larger tensor
            self.end.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, :WIDTH])

    def forward(self, x, which=None, bias=None):
        x = self.begin(x) * self.table[0].to(x.dtype)
        for block in self.blocks:
            x = block(x, which, bias)
        return self.end(x)


def batch(rank: int, step: int) -> torch.Tensor:
    return here(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)))


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1)


def loop(engine, rank, *, which=None, bias=None, between=None, dtype=torch.float32, steps=4):
    for step in range(steps):
        engine.zero_grad()
        output = engine(batch(rank, step).to(dtype), which and which(rank, step), here(bias))
        engine.backward(output.square().mean())
        if between is not None:
            between(engine, rank, step)
        engine.step()


def evaluate(engine, rank, step):
    """Between backward and step, as for a training accuracy."""
    engine.eval()
    with torch.no_grad():
        engine(batch(rank, 100 + step))
    engine.train()


def look_ahead(engine, rank, step):
    """A forward in training, without a backward."""
    engine(batch(rank, 100 + step))


def freeze(engine, rank, step):
    engine.model.begin.requires_grad_(step % 2 == 1)
    engine.model.blocks[1].requires_grad_(step != 1)


# Options of the loop, of the config, of the model.
PROGRAMS = {
    "plain": {},
    "ranks use different layers": {"loop": {"which": lambda rank, step: rank == 0}},
    "now one, now the other": {"loop": {"which": lambda rank, step: step % 2 == 0}},
    "evaluation before the step": {"loop": {"between": evaluate}},
    "gathered weights are kept": {"loop": {"between": evaluate}, "data": {"reshard_after_forward": False}},
    "kept, and a forward before the step": {"loop": {"between": look_ahead}, "data": {"reshard_after_forward": False}},
    "frozen and unfrozen": {"loop": {"between": freeze}},
    "tied blocks": {"model": {"tie": "blocks"}},
    "tied to the rest": {"model": {"tie": "root"}},
    "a view of a larger tensor": {"model": {"tie": "columns"}},
    "large numbers go in": {"loop": {"bias": torch.arange(3000.0, 3004.0)}, "mode": "naive_bf16"},
    "different layers, naive": {"loop": {"which": lambda rank, step: rank == 0}, "mode": "naive_bf16"},
    "float64": {"loop": {"dtype": torch.float64}},
}


ON_SOME_RANKS = ("ranks use different layers", "different layers, naive")
FROM_2_13 = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def run(rank, world_size, strategy):
    found = {}
    for name, program in PROGRAMS.items():
        if strategy == "fsdp" and name in ON_SOME_RANKS and not FROM_2_13:
            continue
        runs = []
        for data in (strategy, "replicate"):
            use = program.get("loop", {})
            model = Net(**program.get("model", {})).to(use.get("dtype"))
            options = {"strategy": data, **(program.get("data", {}) if data == "fsdp" else {})}
            engine = make_engine(options, optimizer=sgd, model=model, **MODES[program.get("mode", "fp32")])
            loop(engine, rank, **use)
            assert all_equal(model), name
            runs.append(whole(engine))
        ours, theirs = ([weights, without_zeros(state), groups] for weights, state, groups in runs)
        found[name] = max(differences(ours, theirs).values())
    return found


def without_zeros(state):
    """Momentum that is zero is made by the fused kernel, and not by others."""
    return {n: s for n, s in state.items() if any(v.any() for v in s.values() if isinstance(v, torch.Tensor))}


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_programs(strategy):
    for found in run_ranks(run, 2, strategy, timeout=120):
        for name, difference in found.items():
            tolerance = 1e-15 if name == "float64" else 5e-3 if "naive" in PROGRAMS[name].get("mode", "") else 2e-6
            assert difference <= tolerance, (name, difference)


class Wrapped:
    """An output that nobody knows how to look into."""

    def __init__(self, logits) -> None:
        self.logits = logits


class Opaque(Net):
    def __init__(self, wrap) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(super().forward(x))


def refused(rank, world_size):
    model = Net()
    model.end.weight.register_hook(lambda grad: grad * 2)
    engine = make_engine("fsdp", model=model)
    with pytest.raises(InputError, match=r"hooks were registered on the gradient of end.weight, which FSDP2 never"):
        loop(engine, rank, steps=1)

    engine = make_engine("fsdp", model=Net())
    loop(engine, rank, steps=1)
    engine.model.to(engine.device)  # which changes nothing
    loop(engine, rank, steps=1)
    engine.model.end.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(InputError, match=r"hooks were registered on the gradient of end.weight"):
        loop(engine, rank, steps=1)

    engine = make_engine("fsdp", model=Net())
    engine.backward(engine(batch(rank, 0)).square().mean())
    engine.model(batch(rank, 1)).square().mean().backward()
    with pytest.raises(InputError, match="added by a backward outside this engine"):
        engine.step()

    for make in (torch.zeros_like, lambda data: torch.zeros_like(data.to_local())):
        engine = make_engine("fsdp", optimizer=sgd, model=Net())
        loop(engine, rank, steps=1)
        weight = engine.model.blocks[1].one.weight
        weight.data = make(weight.data)  # FSDP2 does not hear of it
        began = {
            "": partial(loop, engine, rank, steps=1),
            "engine.full_state_dict: ": engine.full_state_dict,
        }
        for words, use in began.items():
            with pytest.raises(InputError) as caught:
                use()
            assert str(caught.value).startswith(f"{words}new memory was assigned to blocks.1.one.weight")
            assert caught.value.__context__ is None, "said once"


def test_what_fsdp_would_not_hear_of_is_refused():
    run_ranks(refused, 2)


def freed(rank, world_size):
    """Backwards that need weights which FSDP2 has freed."""
    found = {}
    for name in ("object", "penalty", "dict"):
        model = Opaque(lambda x: {"out": x})
        if name == "object":
            model.blocks[1].register_forward_hook(lambda module, args, output: Wrapped(output))
            model.blocks[2].register_forward_pre_hook(lambda module, args: (args[0].logits, *args[1:]))
        engine = make_engine("fsdp", optimizer=sgd, model=model)
        x = batch(rank, 0).requires_grad_()
        output = engine(x)["out"]
        loss = output.square().mean()
        if name == "penalty":
            (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            loss = loss + grad.square().mean()
        found[name] = said(engine.backward, loss)
    return found


def test_weights_that_were_freed_are_explained():
    for found in run_ranks(freed, 2):
        assert "returns tensors inside an object that FSDP2 cannot look into: return tensors" in found["object"]
        assert "the loss contains gradients" in found["penalty"]
        assert found["dict"] == "nothing"


def opaque(rank, world_size):
    runs = []
    for strategy in ("fsdp", "replicate"):
        engine = make_engine(strategy, optimizer=sgd, model=Opaque(Wrapped))
        for step in range(3):
            engine.zero_grad()
            engine.backward(engine(batch(rank, step)).logits.square().mean())
            engine.step()
        runs.append(whole(engine))
    ours, theirs = ([weights, without_zeros(state), groups] for weights, state, groups in runs)
    return max(differences(ours, theirs).values())


def test_an_object_may_come_out_of_the_model():
    """FSDP2 cannot look into it, but the root's weights are still gathered."""
    assert max(run_ranks(opaque, 2)) < 2e-6


def freezes_and_writes(rank, world_size, strategy):
    model = Net()
    engine = make_engine(strategy, optimizer=sgd, model=model)
    loop(engine, rank, steps=1)
    engine.model.end.requires_grad_(False)
    loop(engine, rank, steps=1)
    engine.close()
    assert not model.end.weight.requires_grad
    assert model.begin.weight.requires_grad
    if strategy == "fsdp":
        model = Net()
        given = next(model.parameters())
        engine = make_engine(strategy, optimizer=sgd, model=model)
        given.requires_grad_(False)  # the object that the model came with
        with pytest.raises(InputError, match=r"change it on engine.model's"):
            loop(engine, rank, steps=1)
    options = {"reshard_after_forward": False} if strategy == "fsdp" else {}
    kept = make_engine({"strategy": strategy, **options}, optimizer=sgd, model=Net())
    evaluate(kept, rank, 0)
    with torch.no_grad():
        for param in kept.model.parameters():
            param.fill_(0.25)
    names = [name for name, _ in kept.model.named_parameters()]
    weights = close_whole(kept)
    assert all(bool((weights[name] == 0.25).all()) for name in names)


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_freezing_and_what_is_written_after_an_evaluation_stay(strategy):
    run_ranks(freezes_and_writes, 3, strategy)


def frozen_stage(rank, world_size, strategy):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    model[:2].requires_grad_(False)
    before = model.state_dict()["3.weight"].clone()
    config = {"parallel": {"data": strategy, "pipeline": {"size": 2, "microbatches": 2}}}
    engine = halfmesh.initialize(model, sgd, nn.MSELoss(), config=config, device=rank_device())
    engine.backward(engine.criterion(engine(batch(rank % 2, 0)), here(torch.zeros(4, WIDTH))))
    engine.step()
    assert not torch.equal(close_whole(engine)["3.weight"], before)


@pytest.mark.sends
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_a_stage_of_which_nothing_is_trained(strategy):
    run_ranks(frozen_stage, 4, strategy)


def other_place(rank, world_size, strategy):
    engine = make_engine(strategy)
    saved = engine.state_dict()
    assert {key: saved["layout"][key] for key in ("dp_rank", "dp_size")} == {"dp_rank": rank, "dp_size": 2}
    saved["layout"]["dp_rank"] = 1 - rank
    with pytest.raises(InputError, match=r"the state is of .*dp_rank [01].* and this rank is .*dp_rank [01]"):
        engine.load_state_dict(saved)


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_state_of_another_rank_is_refused(strategy):
    run_ranks(other_place, 2, strategy)


class SetsData(torch.optim.SGD):
    """As some optimizers do: `param.data = ...` in the step."""

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.data = param.data - 0.1 * param.grad


def load_after_a_step(rank: int, world_size: int, data: str) -> list[bool]:
    """Are the loaded weights those of the next forward, by what loads them?"""
    found = []
    for loads in ("engine", "model"):
        engine = halfmesh.initialize(
            here(nn.Linear(4, 4)),
            lambda params: SetsData(params, lr=0.1),
            nn.functional.mse_loss,
            config={"parallel": {"data": data}, "timeout": 30},
            device=rank_device(),
        )
        state = copy.deepcopy((engine if loads == "engine" else engine.model).state_dict())
        x = here(torch.ones(2, 4))
        wanted = engine(x).detach()
        engine.backward(engine.criterion(engine(x), x))
        engine.step()
        (engine if loads == "engine" else engine.model).load_state_dict(state)
        found.append(torch.equal(engine(x).detach(), wanted))
        engine.close()
    return found


@pytest.mark.parametrize("data", ["zero1", "fsdp"])
def test_weights_are_loaded_after_an_optimizer_that_sets_data(data):
    assert run_ranks(load_after_a_step, 2, data) == [[True, True]] * 2
