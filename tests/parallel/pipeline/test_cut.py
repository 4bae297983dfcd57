"""A model is cut: each rank keeps its part, and close gives everything back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim

from halfmesh.errors import InputError
from halfmesh.parallel.context import ParallelContext
from halfmesh.parallel.pipeline.cut import StageCut
from halfmesh.parallel.pipeline.partition import all_entries, resolve
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def make_model(seed: int = 0) -> nn.Sequential:
    """Four stages of two; the weights of the first and the last layer are tied."""
    torch.manual_seed(seed)
    rows: list[nn.Module] = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LayerNorm(4)]
    model = nn.Sequential(*rows, nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[7].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    return model


def make_optimizer(model: nn.Module, kind: str) -> optim.Optimizer:
    """Groups across the stages, the second one with nothing of the first ranks."""
    params = dict(model.named_parameters())
    weights = [p for name, p in params.items() if name.endswith("weight") and not name.startswith("6")]
    last = [p for name, p in params.items() if name.startswith("6")]
    biases = [p for name, p in params.items() if name.endswith("bias") and not name.startswith("6")]
    groups = [{"params": weights[::-1], "lr": 0.01}, {"params": last, "lr": 0.02}, {"params": biases}]
    return optim.Adam(groups) if kind == "adam" else optim.SGD(groups, lr=0.1, momentum=0.9)


def steps(model: nn.Module, optimizer: optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


def cut_in(model: nn.Module, optimizer: optim.Optimizer, size: int, chunks: int = 1) -> tuple[StageCut, list[str]]:
    """The cut, and the stages' names of this rank."""
    context = ParallelContext(size, 1, CPU)
    partition, problems = resolve(model, size, chunks)
    assert partition is not None, problems
    mine = [piece.name for stage in partition.of_rank(context.pp_rank) for piece in partition.stages[stage]]
    return StageCut(model, optimizer, partition, context), mine


def state_of(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, dict[str, Any]]:
    names = {p: name for name, p in model.named_parameters()}
    return {
        names[p]: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        for p, state in optimizer.state.items()
    }


def equal_states(one: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].keys() == other[name].keys()
        and all(
            torch.equal(v, other[name][k]) if isinstance(v, torch.Tensor) else v == other[name][k]
            for k, v in one[name].items()
        )
        for name in one
    )


def cut_and_back(rank: int, world_size: int, kind: str, chunks: int) -> dict[str, bool]:
    model = make_model()
    optimizer = make_optimizer(model, kind)
    steps(model, optimizer, 2)
    entries = dict(all_entries(model))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    groups = [list(group["params"]) for group in optimizer.param_groups]
    names = {id(p): name for name, p in model.named_parameters()}
    state, objects = state_of(model, optimizer), list(model.named_parameters())
    param_groups = optimizer.param_groups
    cut, mine = cut_in(model, optimizer, world_size, chunks)

    own = {entry for entry in entries if entry[0] in mine}
    held = {id(entries[entry]) for entry in own}
    modules = dict(model.named_modules())
    found = {
        "own objects stay": all(getattr(modules[path], name) is entries[path, name] for path, name in own),
        "tied places stay": all(
            getattr(modules[path], name) is t for (path, name), t in entries.items() if id(t) in held
        ),
        "others are None": all(
            getattr(modules[path], name) is None for (path, name), t in entries.items() if id(t) not in held
        ),
        "memory is freed": all(t.untyped_storage().nbytes() == 0 for t in entries.values() if id(t) not in held),
        "gradients are freed": all(t.grad is None for t in entries.values() if id(t) not in held),
        "own values": all(
            torch.equal(model.state_dict()[name], before[name]) for name in before if name in model.state_dict()
        ),
        "names": [name for name, _ in model.named_parameters()] == [name for name, p in objects if id(p) in held],
        "groups": [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        == [[id(p) for p in group if id(p) in held] for group in groups],
        "options stay": [group["lr"] for group in optimizer.param_groups][:2] == [g["lr"] for g in param_groups][:2],
        "state": equal_states(
            state_of(model, optimizer), {n: s for n, s in state.items() if n in dict(model.named_parameters())}
        ),
        "ties": {names[id(p)]: list(ranks) for p, ranks in cut.ties.items()}
        == ({"0.weight": [0, world_size - 1]} if rank in (0, world_size - 1) else {}),
        "tied names": cut.tied_names == ["0.weight"],
        "weights": all(
            cut.weight(p) == (0.5 if names[id(p)] == "0.weight" else 1.0) for _, p in model.named_parameters()
        ),
    }
    (group,) = cut.tie_groups().items()
    found["tie groups"] = group[0] == (0, world_size - 1) and (group[1] is not None) == (rank in (0, world_size - 1))

    # Each rank changes what it holds, as training does; some is replaced, as BatchNorm's counter may be.
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
        for name, buffer in list(model.named_buffers()):
            path, _, own_name = name.rpartition(".")
            setattr(modules[path], own_name, buffer + 1)
        for values in optimizer.state.values():
            for value in values.values():
                value.add_(1)
    cut.close()
    found |= {
        "same objects again": all(
            getattr(modules[path], name) is t
            for (path, name), t in entries.items()
            if isinstance(t, nn.Parameter) or (path, name) not in own
        ),
        "names again": [name for name, _ in model.named_parameters()] == [name for name, _ in objects],
        "values": all(torch.equal(value, before[name] + 1) for name, value in model.state_dict().items()),
        "order of state dict": list(model.state_dict()) == list(before),
        "requires grad": not model[2].bias.requires_grad,
        "groups again": [[id(p) for p in g["params"]] for g in optimizer.param_groups]
        == [[id(p) for p in g] for g in groups],
        "same groups": optimizer.param_groups is param_groups,
        "state again": equal_states(
            state_of(model, optimizer), {n: {k: v + 1 for k, v in s.items()} for n, s in state.items()}
        ),
    }
    # It goes on as if it had never been cut.
    whole = make_model()
    expected = make_optimizer(whole, kind)
    whole.load_state_dict(model.state_dict())
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, optimizer, 2)
    steps(whole, expected, 2)
    found["trains on"] = all(torch.equal(v, whole.state_dict()[n]) for n, v in model.state_dict().items())
    return found


def loads_and_calls(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = make_model()
    optimizer = make_optimizer(model, "sgd")
    kept = list(model.parameters())
    cut, mine = cut_in(model, optimizer, world_size)
    whole = make_model(seed=3).state_dict()
    keys = list(whole)
    result = model.load_state_dict(whole)
    found["loaded"] = (result.missing_keys, result.unexpected_keys) == ([], []) and all(
        torch.equal(value, whole[name]) for name, value in model.state_dict().items()
    )
    found["given state stays"] = list(whole) == keys
    own = model.state_dict()
    # Dicts that are made anew lack the versions of their modules.
    for number, state in enumerate((own, whole), 1):
        model.load_state_dict({name: value + number for name, value in state.items()})
        found[f"loaded {number}"] = all(
            torch.equal(value, whole[name] + number) for name, value in model.state_dict().items()
        )
    for name, do in {
        "called": lambda: model(X),
        "assigned": lambda: model.load_state_dict(whole, assign=True),
        "unknown": lambda: model.load_state_dict({**whole, "9.weight": X}),
        "missing": lambda: model.load_state_dict({n: v for n, v in whole.items() if not n.startswith(mine[0])}),
    }.items():
        try:
            do()
        except (InputError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    added = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [added], "lr": 0.5})
    cut.close()
    found["added"] = [len(g["params"]) for g in optimizer.param_groups] == [6, 2, 6, 1]
    found["added group"] = optimizer.param_groups[-1]["params"][0] is added
    found["whole"] = all(a is b for a, b in zip(kept, model.parameters(), strict=True))
    found["can be called"] = model(X).shape == (6, 4)
    model.load_state_dict(whole)
    found["loads whole"] = all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    return found


class Odd(nn.Module):
    """Modules that keep their parameters in other places, too; things that no stage uses; one module at two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.middle = nn.Linear(4, 4)
        self.again = self.middle
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.idle = nn.Linear(2, 2)
        self.register_buffer("hidden", torch.ones(3), persistent=False)
        self.scalar = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.register_buffer("counts", torch.arange(3).t())
        self.strided = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.again(self.gru(x[:, None])[0][:, 0]) * self.scalar) + self.strided.sum()


def odd_models(rank: int, world_size: int) -> dict[str, Any]:
    model = Odd()
    expected = model(X)
    strides = {name: p.stride() for name, p in model.named_parameters()}
    values = {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    context = ParallelContext(2, 1, CPU)
    partition, problems = resolve(model, 2, 1, ("last",))
    assert partition is not None, problems
    cut = StageCut(model, optimizer, partition, context)
    held = sorted(name for name, _ in (*model.named_parameters(), *model.named_buffers()))
    cut.close()
    now = dict((*model.named_parameters(), *model.named_buffers()))
    return {
        "held": held,
        "values": all(torch.equal(now[name], value) for name, value in values.items()) and now.keys() == values.keys(),
        "strides": strides == {name: p.stride() for name, p in model.named_parameters()},
        "output": torch.equal(model(X), expected),
        "one module": model.again is model.middle,
    }


def left_cut(rank: int, world_size: int) -> bool:
    """Other ranks may be gone: nothing is sent, and nothing given back."""
    model = make_model()
    cut, _ = cut_in(model, make_optimizer(model, "sgd"), world_size)
    held = list(model.state_dict())
    if rank == 0:
        cut.close(whole=False)
    return held == list(model.state_dict())


def two(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "adam": cut_and_back(rank, world_size, "adam", 1),
        "loads": loads_and_calls(rank, world_size),
        "odd": odd_models(rank, world_size),
        "left": left_cut(rank, world_size),
    }


def four(rank: int, world_size: int) -> dict[str, Any]:
    return {"sgd": cut_and_back(rank, world_size, "sgd", 1)}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(two, 2)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_ranks(four, 4)


def test_two_ranks_hold_their_stages_and_give_them_back(two_ranks):
    for rank, found in enumerate(two_ranks):
        assert all(found["adam"].values()), (rank, [name for name, ok in found["adam"].items() if not ok])


def test_four_ranks_hold_their_stages_and_give_them_back(four_ranks):
    for rank, found in enumerate(four_ranks):
        assert all(found["sgd"].values()), (rank, [name for name, ok in found["sgd"].items() if not ok])


def test_states_are_loaded_and_calls_refused(two_ranks):
    for rank, found in enumerate(result["loads"] for result in two_ranks):
        odd = [name for name, ok in found.items() if ok is False]
        assert not odd, (rank, odd)
        assert f"the model itself was called, but this rank holds stage {rank} of it only" in found["called"]
        assert "load_state_dict(..., assign=True) would put parameters into this rank's model" in found["assigned"]
        assert "load without assign, or load before initialize" in found["assigned"]
        assert 'Unexpected key(s) in state_dict: "9.weight"' in found["unknown"]
        assert "Missing key(s) in state_dict" in found["missing"]


def test_odd_models(two_ranks):
    first = ["counts", "gru.bias_hh_l0", "gru.bias_ih_l0", "gru.weight_hh_l0", "gru.weight_ih_l0", "hidden"]
    first += ["idle.bias", "idle.weight", "middle.bias", "middle.weight", "scalar"]
    second = [
        "last.bias",
        "last.parametrizations.weight.original0",
        "last.parametrizations.weight.original1",
        "strided",
    ]
    for found, held in zip((result["odd"] for result in two_ranks), (first, second), strict=True):
        assert found.pop("held") == held
        assert all(found.values()), found


def test_a_model_that_is_left_cut(two_ranks):
    assert all(result["left"] for result in two_ranks)
