"""Optimizers that step parameters as a whole train sharded as in one process: Muon, LAMB, LARS, Adafactor, and own
ones."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn, optim

import halfmesh
from halfmesh.parallel import whole_steps
from halfmesh.verify import verify
from tests.engine.test_several_optimizers import (
    LAYOUTS as BASE,
)
from tests.engine.test_several_optimizers import (
    MODES,
    ORTHOGONALISED_IN_BF16,
    criterion,
    gap,
    halving,
    make_gpt,
    muon_and_adamw,
    split,
)
from tests.support.nano_gpt import CONTEXT, PLAN, WORDS
from tests.support.ranks import here, rank_device, run_ranks

TENSOR = {"size": 2, "plan": PLAN}
LAYOUTS = {
    **{name: BASE[name] for name in ("zero1", "fsdp", "tensor")},
    "zero1 x tensor": (4, {"data": "zero1", "tensor": TENSOR}),
    "fsdp x tensor": (4, {"data": "fsdp", "tensor": TENSOR}),
    "hybrid": (4, {"data": {"strategy": "fsdp", "hybrid": 2}}),
    "offload": (2, {"data": {"strategy": "fsdp", "cpu_offload": True}}),
    "zero1 of 3": (3, {"data": "zero1"}),
    "fsdp of 3": (3, {"data": "fsdp"}),
    "zero1 x pipeline": (4, {"data": "zero1", **BASE["pipeline"][1]}),
}


class Whitened(optim.SGD):
    """As Shampoo: a gradient is divided by a root of its products, which are kept."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad, state = param.grad.double().reshape(len(param), -1), self.state[param]
                state["left"] = state.get("left", 0) + (grad @ grad.T).float()
                values, vectors = torch.linalg.eigh(state["left"].double())
                root = vectors @ (values.clamp(min=0) + 1e-2).rsqrt().diag() @ vectors.T
                param.data.sub_((root @ grad).view_as(param), alpha=group["lr"])


class Brief(optim.SGD):
    """As people write it for a model of their own: it sets `data`, and expects a gradient of each parameter."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data = param.data - group["lr"] * param.grad / (param.grad.norm() + 0.01)


def of_timm(name: str, params: Any, **settings: Any) -> list[optim.Optimizer]:
    return [getattr(pytest.importorskip("timm.optim"), name)(list(params), **settings)]


OPTIMIZERS: dict[str, Any] = {
    "muon": muon_and_adamw,
    "adafactor": lambda params: [optim.Adafactor(list(params), lr=0.01)],
    "lamb": partial(of_timm, "Lamb", lr=0.01, max_grad_norm=None),
    "lars": partial(of_timm, "Lars", lr=0.05, momentum=0.9, weight_decay=0.01),
    "timm_muon": partial(of_timm, "Muon", lr=0.01),
    "own": lambda params: [Whitened(list(params), lr=0.01)],
    "brief": lambda params: [Brief(list(params), lr=0.01)],
}
UPDATES = 3
SAVED_AFTER = 2


def batch(update: int, part: int, context: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A data rank's rows of one of the two parts of an update."""
    generator = torch.Generator().manual_seed(2 * update + part)
    ids = torch.randint(WORDS, (12, CONTEXT + 1), generator=generator)[context.dp_rank :: context.dp_size]
    return here((ids[:, :-1], ids[:, 1:]))


def begin(which: str, parallel: Any, mode: str = "none", **options: Any) -> tuple[Any, Any]:
    config = {**MODES[mode][0], "parallel": parallel, "gradient_accumulation": 2, "clip_grad_norm": 0.5, **options}
    model = make_gpt()
    optimizers = OPTIMIZERS[which](model.parameters())
    engine = halfmesh.initialize(model, optimizers, criterion, None, config, device=rank_device(), lr_scheduler=halving)
    return engine, engine.averaged_model(0.5)


def train(engine: Any, updates: Any, factor: float = 1.0) -> list[float]:
    """Returns the norm of each update."""
    norms = []
    for update in updates:
        for part in range(2):
            x, y = batch(update, part, engine.context)
            loss = engine.criterion(engine(x), y)
            engine.backward(loss if factor == 1 else loss * factor)
            result = engine.step()
        norms.append(float(result.grad_norm))
    return norms


def state_of(engine: Any, average: Any) -> dict[str, Any]:
    full = engine.full_state_dict(optimizer=True, rank0_only=False)
    with average.applied():
        averaged = engine.full_state_dict(rank0_only=False)
    return {"weights": full["model"], "state": full["optimizer"]["state"], "average": averaged}


def everything(which: str, parallel: Any, mode: str, folder: str) -> dict[str, Any]:
    """Trains, with a skipped update; saves; and trains on, resumed and not."""
    engine, average = begin(which, parallel, mode)
    norms = train(engine, range(SAVED_AFTER))
    if mode == "naive_fp16":
        before = state_of(engine, average)
        train(engine, [9], float("inf"))
        torch.testing.assert_close(state_of(engine, average), before, rtol=0, atol=0)
        assert engine.skipped_steps == 1
    assert ("whole matrices by their owners" in engine.plan.rows["update"]) == bool(parallel)
    engine.save(folder)
    norms += train(engine, range(SAVED_AFTER, UPDATES))
    found = state_of(engine, average)
    engine.close()
    again, average = begin(which, parallel, mode)
    train(again, [7])  # a state of its own, to be overwritten
    again.load(folder)
    train(again, range(SAVED_AFTER, UPDATES))
    torch.testing.assert_close(state_of(again, average), found, rtol=0, atol=0)
    return {"norms": norms, **found}


def on_ranks(rank: int, world_size: int, *given: Any) -> dict[str, Any]:
    return everything(*given)


@cache
def in_one_process(which: str, mode: str) -> tuple[dict[str, Any], str]:
    folder = tempfile.mkdtemp()
    return everything(which, {}, mode, folder), folder


def compare(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for kind in ("weights", "average"):
        model = nn.ParameterDict({name.replace(".", "/"): value for name, value in expected[kind].items()})
        weights = {name.replace(".", "/"): value for name, value in found[kind].items()}
        assert gap(weights, model) <= tolerance, kind
    assert found["state"].keys() == expected["state"].keys()
    for name, values in expected["state"].items():
        assert found["state"][name].keys() == values.keys()
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                largest = float(value.abs().max())
                torch.testing.assert_close(found["state"][name][key], value, rtol=0, atol=50 * tolerance * largest)
            else:
                assert found["state"][name][key] == value


def tolerance_of(which: str, mode: str) -> float:
    return max(MODES[mode][1], ORTHOGONALISED_IN_BF16 if "muon" in which else 2e-6)


@pytest.mark.promise(
    "optimizers that need whole matrices (Muon, LAMB, LARS, Adafactor), sharded",
    "each matrix is stepped by the rank that owns it, as in one process; saved and resharded",
    of="PyTorch",
    page="loop.md",
)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("which", "layout", "mode"),
    [
        *((which, layout, "none") for which in ("muon", "lamb", "own") for layout in ("zero1", "fsdp", "tensor")),
        *(("lamb", layout, "naive_fp16") for layout in ("zero1", "fsdp", "tensor")),
        ("muon", "fsdp", "torch_bf16"),
        ("timm_muon", "zero1", "none"),
        *(("brief", layout, "none") for layout in ("zero1", "fsdp")),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                *((which, layout, "none") for which in ("adafactor", "lars") for layout in ("zero1", "fsdp", "tensor")),
                ("brief", "tensor", "none"),
                *(("lamb", layout, "none") for layout in list(LAYOUTS)[3:]),
                *(("muon", layout, "none") for layout in ("zero1 x tensor", "fsdp of 3", "zero1 x pipeline")),
                *(("muon", layout, "naive_fp16") for layout in ("zero1", "tensor")),
            )
        ),
    ],
)
def test_layouts_train_as_one_process_and_resume(which, layout, mode, tmp_path):
    expected, _ = in_one_process(which, mode)
    ranks, parallel = LAYOUTS[layout]
    tolerance = tolerance_of(which, mode)
    for found in run_ranks(on_ranks, ranks, which, parallel, mode, str(tmp_path)):
        assert found["norms"] == pytest.approx(expected["norms"], rel=max(tolerance, 1e-5))
        compare(found, expected, tolerance)


# -- state -------------------------------------------------------------------------------------------------------------


def resumed(rank: int, world_size: int, which: str, parallel: Any, saved: str, folder: str) -> dict[str, Any]:
    """Loads what another layout saved, saves it, loads that, and trains on."""
    for each in (saved, folder):
        engine, average = begin(which, parallel)
        train(engine, [7])
        engine.load(each)
        engine.save(folder)
    train(engine, range(SAVED_AFTER, UPDATES))
    return state_of(engine, average)


@pytest.mark.promise("optimizers that need whole matrices (Muon, LAMB, LARS, Adafactor), sharded")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("which", "layout"),
    [
        ("lamb", "zero1 of 3"),
        ("adafactor", "fsdp"),
        ("adafactor", "tensor"),
        ("muon", "zero1 x tensor"),
        ("own", "zero1"),
    ],
)
def test_state_is_resharded(which, layout, tmp_path):
    """From one process to a layout, and from that to one process."""
    expected, saved = in_one_process(which, "none")
    ranks, parallel = LAYOUTS[layout]
    for found in run_ranks(resumed, ranks, which, parallel, saved, str(tmp_path)):
        compare(found, expected, tolerance_of(which, "none"))
    compare(resumed(0, 1, which, {}, str(tmp_path), str(tmp_path / "again")), expected, tolerance_of(which, "none"))


def with_state(rank: int, world_size: int, parallel: Any, half: bool = False) -> dict[str, torch.Tensor]:
    """An optimizer that has stepped before it is given; of a model in half precision its state is cast."""
    model = make_gpt().to(torch.bfloat16 if half else torch.float32)
    optimizers = muon_and_adamw(model.parameters())
    for param in model.parameters():
        param.grad = param.detach().sin()
    for optimizer in optimizers:
        optimizer.step()
    config = {
        "parallel": parallel,
        "gradient_accumulation": 2,
        "clip_grad_norm": 0.5,
        **MODES["naive_bf16" if half else "none"][0],
    }
    engine = halfmesh.initialize(model, optimizers, criterion, None, config, device=rank_device())
    assert all(v.dtype == torch.float32 for state in engine.optimizer.state.values() for v in state.values())
    train(engine, range(1))
    return engine.full_state_dict(rank0_only=False)


@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "half"), [("zero1", False), ("fsdp", False), ("tensor", False), ("zero1", True)])
def test_state_that_was_given_goes_to_the_owners(layout, half):
    expected = {name.replace(".", "/"): value for name, value in with_state(0, 1, {}, half).items()}
    for found in run_ranks(with_state, 2, LAYOUTS[layout][1], half):
        weights = {name.replace(".", "/"): value for name, value in found.items()}
        assert gap(weights, nn.ParameterDict(expected)) <= tolerance_of("muon", "naive_bf16" if half else "none")


def with_a_group_added(rank: int, world_size: int, parallel: Any, folder: str) -> dict[str, torch.Tensor]:
    """The new group's state is saved after its first step, and loaded before it."""
    found = list[dict[str, Any]]()
    for loads in (False, True):
        model = make_gpt()
        late = list(model.transformer["h"][1].mlp.parameters())
        others = [param for param in model.parameters() if all(param is not one for one in late)]
        config = {"parallel": parallel, "gradient_accumulation": 2, "clip_grad_norm": 0.5}
        engine = halfmesh.initialize(model, Whitened(others, lr=0.01), criterion, None, config, device=rank_device())
        train(engine, [] if loads else [0])
        engine.optimizer.add_param_group({"params": late})
        if loads:
            engine.load(folder)
        else:
            train(engine, [1])
            engine.save(folder)
        train(engine, [2])
        full = engine.full_state_dict(optimizer=True, rank0_only=False)
        found.append({"model": full["model"], "state": full["optimizer"]["state"]})
        engine.close()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    return found[0]["model"]


@pytest.mark.distributed
def test_state_of_a_group_that_was_added_goes_to_the_owners(tmp_path):
    expected = with_a_group_added(0, 1, {}, str(tmp_path / "one"))
    weights = nn.ParameterDict({name.replace(".", "/"): value for name, value in expected.items()})
    for found in run_ranks(with_a_group_added, 2, {"tensor": TENSOR}, str(tmp_path / "two")):
        assert gap({name.replace(".", "/"): value for name, value in found.items()}, weights) <= 2e-6


def held_bytes(rank: int, world_size: int, parallel: Any, widths: Sequence[int]) -> tuple[list[int], int]:
    """The elements of optimizer state on this rank, and those that it sends in an update besides the reductions."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in pairwise(widths)))
    engine = halfmesh.initialize(
        model, optim.Muon(model.parameters(), lr=0.1), nn.functional.mse_loss, None, {"parallel": parallel}
    )
    sent, send = [0], whole_steps.send_rows

    def counted(flat: torch.Tensor, sizes: list[int], received: list[int], group: Any) -> torch.Tensor:
        sent[0] += sum(sizes) - sizes[group.rank()]
        return send(flat, sizes, received, group)

    whole_steps.send_rows = counted
    try:
        engine.backward(engine.criterion(engine(torch.ones(2, 8)), torch.zeros(2, 8)))
        engine.step()
    finally:
        whole_steps.send_rows = send
    state = [value for values in engine.optimizer.state.values() for value in values.values()]
    return sum(value.numel() for value in state if value.dim()), sent[0]


@pytest.mark.promise("optimizers that need whole matrices (Muon, LAMB, LARS, Adafactor), sharded")
@pytest.mark.distributed
def test_owners_have_equal_shares_and_slices_are_sent_once():
    """Of 8 matrices each of 4 ranks steps a large one or three small ones. zero1 sends no more than it does for other
    optimizers; fsdp sends the slices of gradients and weights that are elsewhere, and back those of new weights."""
    widths = [8, 8, 24, 8, 8, 8, 8, 8, 8]
    assert run_ranks(held_bytes, 4, {"data": "zero1"}, widths) == [(192, 0)] * 4
    assert run_ranks(held_bytes, 4, {"data": "fsdp"}, widths) == [(192, 3 * 192 * 3 // 4)] * 4


@pytest.mark.distributed
def test_a_matrix_that_would_be_mostly_padding_is_cut_and_put_together():
    """One matrix for 4 ranks: a chunk of it for each would send 4 times as much."""
    found = run_ranks(held_bytes, 4, {"data": "zero1"}, [8, 8])
    assert sorted(found) == [(0, 2 * 16), (0, 2 * 16), (0, 2 * 16), (64, 3 * 16)]


def tied_slice(rank: int, world_size: int) -> list[int]:
    engine, _ = begin("lamb", LAYOUTS["zero1 x pipeline"][1])
    shards = engine._update.master_weights.shards
    return [shard.param.numel() for shard in shards if shard.name in ("lm_head.weight", "transformer.wte.weight")]


@pytest.mark.distributed
def test_stages_that_share_a_parameter_cut_it_in_the_same_way():
    """Their gradients are summed slice by slice, and each stage has other loads to balance."""
    numel = make_gpt().lm_head.weight.numel()
    assert run_ranks(tied_slice, 4) == [[numel // 2]] * 4


# -- what may happen in a loop -----------------------------------------------------------------------------------------


def in_a_loop(rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    """A group is added between updates, a frozen parameter is trained from then on, and a hook of the user's fails."""
    parallel = {} if world_size == 1 else {"tensor": TENSOR}
    model = make_gpt()
    matrices, others = split(model.parameters())
    others, matrices = matrices[1:], matrices[:1]
    others[0].requires_grad_(False)
    optimizer = optim.Muon(matrices, lr=0.02)
    config = {"parallel": parallel, "gradient_accumulation": 2, "clip_grad_norm": 0.5}
    engine = halfmesh.initialize(model, optimizer, criterion, None, config, device=rank_device())
    train(engine, range(1))
    optimizer.add_param_group({"params": others})
    train(engine, range(1, 2))
    others[0].requires_grad_(True)
    train(engine, range(2, 3))
    hook = optimizer.register_step_post_hook(lambda *_: [][0])
    with pytest.raises(IndexError):
        train(engine, range(3, 4))
    hook.remove()
    train(engine, range(4, 5))
    full = engine.full_state_dict(optimizer=True, rank0_only=False)
    return full["model"], sorted(full["optimizer"]["state"])


@pytest.mark.distributed
def test_groups_are_followed_and_a_failed_step_keeps_the_state():
    weights, names = in_a_loop(0, 1)
    expected = nn.ParameterDict({name.replace(".", "/"): value for name, value in weights.items()})
    for found, of_rank in run_ranks(in_a_loop, 2):
        assert gap({name.replace(".", "/"): value for name, value in found.items()}, expected) <= 2e-3
        assert of_rank == names


def build() -> Any:
    """Muon makes 3e-3 of the last bits of its bf16 with these."""
    return make_gpt(), (torch.randint(WORDS, (8, CONTEXT)), torch.randint(WORDS, (8, CONTEXT))), criterion


@pytest.mark.promise("optimizers that need whole matrices (Muon, LAMB, LARS, Adafactor), sharded")
@pytest.mark.distributed
def test_verify_proves_it():
    report = verify({"parallel": {"tensor": TENSOR}}, build, world_size=2, optimizer=muon_and_adamw)
    assert report.equal, str(report)
