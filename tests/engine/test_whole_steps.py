"""Optimizers that step parameters as a whole train sharded as in one process: Muon, LAMB, LARS, Adafactor, and own
ones."""

from __future__ import annotations

import tempfile
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import halfmesh
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


def of_timm(name: str, params: Any, **settings: Any) -> list[optim.Optimizer]:
    return [getattr(pytest.importorskip("timm.optim"), name)(list(params), **settings)]


OPTIMIZERS: dict[str, Any] = {
    "muon": muon_and_adamw,
    "adafactor": lambda params: [optim.Adafactor(list(params), lr=0.01)],
    "lamb": partial(of_timm, "Lamb", lr=0.01, max_grad_norm=None),
    "lars": partial(of_timm, "Lars", lr=0.05, momentum=0.9, weight_decay=0.01),
    "timm_muon": partial(of_timm, "Muon", lr=0.01),
    "own": lambda params: [Whitened(list(params), lr=0.01)],
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


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("which", "layout", "mode"),
    [
        *((which, layout, "none") for which in OPTIMIZERS for layout in ("zero1", "fsdp", "tensor")),
        *(("lamb", layout, "none") for layout in list(LAYOUTS)[3:]),
        *(("muon", layout, "none") for layout in ("zero1 x tensor", "fsdp of 3", "zero1 x pipeline")),
        *((which, layout, "naive_fp16") for which in ("muon", "lamb") for layout in ("zero1", "fsdp", "tensor")),
        *(("muon", layout, "torch_bf16") for layout in ("zero1", "fsdp", "tensor")),
    ],
)
def test_layouts_train_as_one_process_and_resume(which, layout, mode, tmp_path):
    expected, _ = in_one_process(which, mode)
    ranks, parallel = LAYOUTS[layout]
    tolerance = tolerance_of(which, mode)
    for found in run_ranks(on_ranks, ranks, which, parallel, mode, str(tmp_path)):
        assert found["norms"] == pytest.approx(expected["norms"], rel=max(tolerance, 1e-5))
        compare(found, expected, tolerance)
