"""What models and loops do that could part zero1 and fsdp from replicated weights."""

from __future__ import annotations

import copy
import math
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from halfmesh.errors import IncompatibleConfigError, InputError
from tests.support.ranks import RankFailure, free_port, run_ranks
from tests.support.sharding import MODES, all_equal, differences, make_engine, take_step, train, whole

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

    def forward(self, x, which=None, bias=None):
        x = self.begin(x) * self.table[0].to(x.dtype)
        for block in self.blocks:
            x = block(x, which, bias)
        return self.end(x)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1)


def loop(engine, rank, *, which=None, bias=None, between=None, steps=4):
    for step in range(steps):
        engine.zero_grad()
        output = engine(batch(rank, step), which and which(rank, step), bias)
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


def double(model):
    return model.double()


# Options of the loop, of the config, of the model.
PROGRAMS = {
    "plain": {},
    "ranks use different layers": {"loop": {"which": lambda rank, step: rank == 0}},
    "now one, now the other": {"loop": {"which": lambda rank, step: step % 2 == 0}},
    "a rank in turn": {"loop": {"which": lambda rank, step: (step + rank) % 2 == 0}},
    "evaluation before the step": {"loop": {"between": evaluate}},
    "gathered weights are kept": {"loop": {"between": evaluate}, "data": {"reshard_after_forward": False}},
    "kept, and a forward before the step": {"loop": {"between": look_ahead}, "data": {"reshard_after_forward": False}},
    "frozen and unfrozen": {"loop": {"between": freeze}},
    "tied blocks": {"model": {"tie": "blocks"}},
    "tied to the rest": {"model": {"tie": "root"}},
    "large numbers go in": {"loop": {"bias": torch.arange(3000.0, 3004.0)}, "mode": "naive_bf16"},
    "different layers, naive": {"loop": {"which": lambda rank, step: rank == 0}, "mode": "naive_bf16"},
    "float64": {"convert": double},
}


ON_SOME_RANKS = ("ranks use different layers", "a rank in turn", "different layers, naive")
FROM_2_13 = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def run(rank, world_size, strategy):
    found = {}
    for name, program in PROGRAMS.items():
        if strategy == "fsdp" and name in ON_SOME_RANKS and not FROM_2_13:
            continue
        runs = []
        for data in (strategy, "replicate"):
            model = program.get("convert", lambda m: m)(Net(**program.get("model", {})))
            options = {"strategy": data, **(program.get("data", {}) if data == "fsdp" else {})}
            config = MODES[program.get("mode", "fp32")]
            engine = make_engine(options, optimizer=sgd, model=model, **config)
            if name == "float64":
                loop_in_double(engine, rank)
            else:
                loop(engine, rank, **program.get("loop", {}))
            runs.append(whole(engine))
            assert all_equal(model), name
        ours, theirs = ([weights, without_zeros(state), groups] for weights, state, groups in runs)
        found[name] = max(differences(ours, theirs).values())
    return found


def loop_in_double(engine, rank):
    for step in range(3):
        engine.zero_grad()
        engine.backward(engine(batch(rank, step).double()).square().mean())
        engine.step()


def without_zeros(state):
    """Momentum that is zero is made by the fused kernel, and not by others."""
    return {n: s for n, s in state.items() if any(v.any() for v in s.values() if isinstance(v, torch.Tensor))}


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_programs(strategy):
    for found in run_ranks(run, 2, strategy, timeout=120):
        for name, difference in found.items():
            tolerance = 1e-15 if name == "float64" else 5e-3 if "naive" in PROGRAMS[name].get("mode", "") else 2e-6
            assert difference <= tolerance, (name, difference)


def on_some_ranks(rank, world_size):
    engine = make_engine("fsdp", optimizer=sgd, model=Net())
    loop(engine, rank, **PROGRAMS["ranks use different layers"]["loop"])


@pytest.mark.skipif(FROM_2_13, reason="torch can do it since 2.13")
def test_layers_that_only_some_ranks_use_are_refused_by_older_torch():
    with pytest.raises(RankFailure, match="Either only some ranks used these in this batch"):
        run_ranks(on_some_ranks, 2, timeout=60)


class Wrapped:
    """An output that nobody knows how to look into."""

    def __init__(self, logits) -> None:
        self.logits = logits


class Opaque(nn.Module):
    def __init__(self, wrap=Wrapped) -> None:
        super().__init__()
        self.net = Net()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(self.net(x))


def refused(rank, world_size):
    model = Net()
    model.end.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(IncompatibleConfigError, match=r"end.weight has hooks on its gradient, which FSDP2 never calls"):
        make_engine("fsdp", model=model)
    assert type(model) is Net

    engine = make_engine("fsdp", model=Net())
    loop(engine, rank, steps=1)
    engine.model.end.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(InputError, match=r"hooks were registered on the gradient of end.weight"):
        loop(engine, rank, steps=1)

    engine = make_engine("fsdp", model=Net())
    engine.backward(engine(batch(rank, 0)).square().mean())
    engine.model(batch(rank, 1)).square().mean().backward()
    with pytest.raises(InputError, match="added by a backward outside this engine"):
        engine.step()

    engine = make_engine("zero1", model=Net())  # its own memory is followed, to the end
    loop(engine, rank, steps=2)
    for param in engine.model.parameters():
        param.data = torch.full_like(param, 0.5)
    engine.close()
    return all(bool((param == 0.5).all()) for param in engine.model.parameters())


def test_what_is_refused_and_what_is_followed():
    assert run_ranks(refused, 2, timeout=60) == [True, True]


def opaque(rank, world_size):
    runs = []
    for data in ({"strategy": "fsdp", "reshard_after_forward": False}, "replicate"):
        engine = make_engine(data, optimizer=sgd, model=Opaque())
        for step in range(3):
            engine.zero_grad()
            try:
                engine.backward(engine(batch(rank, step)).logits.square().mean())
            except InputError as error:
                return str(error)
            engine.step()
        runs.append(whole(engine))
    return max((runs[0][0][name] - value).abs().sum().item() for name, value in runs[1][0].items())


def test_outputs_that_fsdp_cannot_look_into_are_trained_or_refused():
    """By torch since 2.13; before it would leave these gradients where they are."""
    for found in run_ranks(opaque, 2, timeout=60):
        assert "returns tensors within an object" in found if isinstance(found, str) else found <= 1e-6


def given_up(rank, world_size):
    """Backwards that need weights which FSDP2 has given up, and did not see that they are needed."""
    found = {}
    for name in ("object", "penalty", "dict"):
        engine = make_engine("fsdp", optimizer=sgd, model=Opaque({"object": Wrapped}.get(name, lambda x: {"out": x})))
        x = batch(rank, 0).requires_grad_()
        output = engine(x)
        output = output.logits if name == "object" else output["out"]
        loss = output.square().mean()
        if name == "penalty":
            (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            loss = loss + grad.square().mean()
        try:
            engine.backward(loss)
        except InputError as error:
            found[name] = str(error), "storage of size 0" in str(error.__cause__)
    return found


def test_weights_that_were_given_up_are_explained():
    for found in run_ranks(given_up, 2, timeout=60):
        assert found.keys() == {"object", "penalty"}
        for message, has_cause in found.values():
            assert "returns tensors within an object that it cannot look into: return tensors" in message
            assert "gradients of gradients were asked for" in message
            assert has_cause


class Meets(Net):
    """Calls a block on one rank only, where the other is late."""

    late = False

    def forward(self, x):
        x = self.blocks[0](self.begin(x))
        if self.late:
            time.sleep(4)
            return x
        return self.end(self.blocks[1](x))


def waits(rank, world_size, port):
    limit = timedelta(seconds=1.5)
    address = f"tcp://localhost:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=limit)
    model = Meets()
    engine = make_engine("fsdp", optimizer=sgd, model=model)
    model.late = rank == 1
    try:
        engine(batch(rank, 0))
    except RuntimeError as error:
        return error.__notes__


def test_a_rank_that_waits_for_a_block_says_for_which():
    notes, _ = run_ranks(waits, 2, free_port(), init=False, timeout=60)
    assert len(notes) == 1
    assert notes[0].startswith("this rank called 'blocks.1', for which all data ranks gather weights together")


def exchanged(rank, world_size):
    """Memory that FSDP2 does not hear of: plain tensors, and DTensors."""
    found = []
    for make in (torch.zeros_like, lambda data: torch.zeros(data.to_local().shape)):
        engine = make_engine("fsdp", optimizer=sgd, model=Net())
        loop(engine, rank, steps=1)
        engine.model.to("cpu")  # which changes nothing
        loop(engine, rank, steps=1)
        weight = engine.model.blocks[1].one.weight
        weight.data = make(weight.data)
        for use in (partial(loop, engine, rank, steps=1), engine.close):
            with pytest.raises(InputError) as caught:
                use()
            found.append(str(caught.value))
    return found


def test_memory_that_was_exchanged_is_refused():
    for found in run_ranks(exchanged, 2, timeout=60):
        assert len(found) == 4
        for message in found:
            assert message.startswith("the memory of blocks.1.one.weight was exchanged (param.data = ...")


def frozen_stage(rank, world_size, strategy):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    config = {"parallel": {"data": strategy, "pipeline": {"size": 2, "microbatches": 2}}}
    import halfmesh

    engine = halfmesh.initialize(model, partial(torch.optim.SGD, lr=0.1), nn.MSELoss(), config=config, device="cpu")
    loss = engine.criterion(engine(batch(rank % 2, 0)), torch.zeros(4, WIDTH))
    engine.backward(loss)
    engine.step()
    value = loss.item()
    engine.close()
    return value


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_a_stage_of_which_nothing_is_trained(strategy):
    assert all(math.isfinite(value) for value in run_ranks(frozen_stage, 4, strategy, timeout=60))


class SkipsEmpty(torch.optim.SGD):
    """Keeps state of its own, where there is something to step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    state = self.state[param]
                    state["mean"] = state.get("mean", torch.zeros_like(param)).mul(0.9).add(param.grad)
                    param.data.sub_(state["mean"], alpha=group["lr"])


def corners(rank, world_size, strategy):
    found = {}
    ours = make_engine(strategy, optimizer=partial(SkipsEmpty, lr=0.1), model=Net())
    theirs = make_engine("replicate", optimizer=partial(SkipsEmpty, lr=0.1), model=Net())
    for engine in (ours, theirs):
        loop(engine, rank, steps=2)
    found["own state"] = max(differences(whole(ours), whole(theirs)).values())

    model = Net()
    params = list(model.parameters())
    engine = make_engine(strategy, optimizer=sgd, model=model)
    loop(engine, rank, steps=1)
    engine.model.end.requires_grad_(False)
    loop(engine, rank, steps=1)
    engine.close()
    found["frozen after close"] = not model.end.weight.requires_grad and model.begin.weight.requires_grad
    if strategy == "fsdp":
        engine = make_engine(strategy, optimizer=sgd, model=Net())
        params = [part.original for part in engine._division.sharded.parts]
        params[0].requires_grad_(False)
        with pytest.raises(InputError, match=r"change it on engine.model's"):
            loop(engine, rank, steps=1)
        kept = make_engine({"strategy": "fsdp", "reshard_after_forward": False}, optimizer=sgd, model=Net())
        evaluate(kept, rank, 0)
        with torch.no_grad():
            for param in kept.model.parameters():
                param.fill_(0.25)
        kept.close()
        found["written"] = all(bool((p == 0.25).all()) for p in kept.model.parameters())
    return found


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_corners(strategy):
    for found in run_ranks(corners, 3, strategy, timeout=60):
        assert found.pop("own state") <= 2e-6
        assert all(found.values()), found


def resumes(rank, world_size, strategy):
    found = {}
    for mode in ("fp32", "naive_fp16"):
        straight = make_engine(strategy, **MODES[mode])
        train(straight, rank, 3)
        saved = copy.deepcopy(straight.state_dict())
        train(straight, rank, 3, first=3)
        resumed = make_engine(strategy, **MODES[mode])
        train(resumed, rank, 1, first=9)
        resumed.load_state_dict(saved)
        train(resumed, rank, 3, first=3)
        found[mode] = max(differences(whole(resumed), whole(straight)).values())
        found["layout"] = dict(saved["layout"])
        saved["layout"]["dp_rank"] = 1 - rank
        other = make_engine(strategy, **MODES[mode])
        with pytest.raises(InputError, match=r"part . of 2 of it \(zero1 or fsdp\), and this rank part"):
            other.load_state_dict(saved)
        other.close()
    return found


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_resumes_exactly_at_the_same_place_only(strategy):
    for rank, found in enumerate(run_ranks(resumes, 2, strategy, timeout=60)):
        assert found["fp32"] == found["naive_fp16"] == 0
        assert {key: found["layout"][key] for key in ("dp_rank", "dp_size")} == {"dp_rank": rank, "dp_size": 2}


def skips_together(rank, world_size, strategy):
    engine = make_engine(strategy, **MODES["naive_fp16"])
    results = [take_step(engine, rank, step, poison=rank == 1 and step == 1) for step in range(3)]
    told = [(r.skipped, r.loss_scale, r.grad_norm) for r in results]
    model = engine.model
    engine.close()
    return told, all_equal(model)


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_inf_on_one_rank_skips_on_all(strategy):
    (first, equal), (second, _) = run_ranks(skips_together, 2, strategy, timeout=60)
    assert [skipped for skipped, _, _ in first] == [False, True, False]
    assert repr(first) == repr(second)
    assert equal
