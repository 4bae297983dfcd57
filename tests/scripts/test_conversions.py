"""The scripts of examples/own_loop print after their conversion what they printed before, and train in any layout."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from halfmesh.distributed.local_ranks import free_port
from halfmesh.verify import phases
from tests.support.example_runs import ROOT, as_main, numbers
from tests.support.proofs import LEFT_OUT
from tests.support.ranks import run_ranks

from .conversions import PAGE, ROW, SCRIPTS, figures

pytestmark = pytest.mark.distributed

FIGURES = r"(?:loss|centre|norm|lr|wd|perplexity) (\d[\d.e+-]*)"
FP16 = "fp16={mode: torch, init_scale: 65536}"  # GradScaler's


class Pair(NamedTuple):
    """A script before and after its conversion."""

    args: tuple[str, ...] = ()  # of both, which make it short
    needs: tuple[str, ...] = ()
    half: tuple[str, str] | None = None  # the option of the one before for half precision, and the other's setting
    full: tuple[str, str] = ("", "")
    data_ranks: tuple[str, ...] | None = None  # options with which both draw the same batches on two data ranks
    rel: float = 1e-5  # what rounding makes of the figures in fp32


PAIRS = {
    "mnist": Pair(("--epochs=2", "--dropout=0", "--lr=0.3"), rel=0.0),
    "nanogpt": Pair(data_ranks=("--eval-interval=0",)),  # before, rank 0 alone draws batches for it
    "imagenet": Pair(("--epochs=2",), rel=2e-3),
    "clm": Pair((), ("accelerate", "transformers"), ("--mixed-precision=bf16", "bf16.mode=torch")),
    "dino": Pair((), ("timm",), ("--use-fp16", FP16), data_ranks=()),
    "mae": Pair((), ("timm",), ("--use-fp16", FP16), data_ranks=(), rel=1e-4),
    "modded": Pair((), (), ("", "bf16.mode=torch"), ("--dtype=float32", "bf16=null"), data_ranks=(), rel=1e-4),
    "timm": Pair((), ("timm",), ("--amp", FP16), data_ranks=()),
}


@cache
def printed(script: str, ranks: int, *args: str) -> str:
    """What rank 0 prints, without the options that are empty."""
    pair = PAIRS[script.partition("_")[0]]
    if missing := [package for package in pair.needs if find_spec(package) is None]:
        pytest.skip(f"no {' and '.join(missing)} here")
    args = (*pair.args, *(arg for arg in args if arg))
    return run_ranks(alone, ranks, f"own_loop/{script}.py", args, free_port(), init=False, timeout=100)[0]


def alone(rank: int, world_size: int, *args: Any) -> str:
    """What the script prints. The engine gives each data rank random numbers of its own, so on several ranks MAE's
    masks are the same for all images."""
    draw = torch.rand

    def same_in_rows(*size: Any, **options: Any) -> torch.Tensor:
        return draw(1, *size[1:], generator=torch.Generator().manual_seed(0), **options).expand(size)

    with patch("torch.rand", draw if world_size == 1 else same_in_rows):
        text, status = as_main(rank, world_size, *args)
    assert status == 0
    if accelerate := sys.modules.get("accelerate"):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return text


def before(name: str, ranks: int, *args: str) -> list[float]:
    return numbers(FIGURES, printed(f"{name}_before", ranks, *args))


def after(name: str, ranks: int, *settings: str, args: tuple[str, ...] = ()) -> list[float]:
    return numbers(FIGURES, printed(f"{name}_after", ranks, *args, *(f"--set={one}" for one in settings if one)))


@pytest.mark.parametrize("name", [pytest.param("clm", marks=pytest.mark.slow), *sorted(PAIRS.keys() - {"clm"})])
def test_in_one_process_fp32_is_the_same(name):
    option, setting = PAIRS[name].full
    expected = before(name, 1, option)
    assert after(name, 1, setting) == pytest.approx(expected, rel=PAIRS[name].rel, abs=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, pair in PAIRS.items() if pair.half])
def test_in_half_precision(name):
    (option, setting), (full, _) = PAIRS[name].half, PAIRS[name].full
    expected = before(name, 1, option)
    assert expected != before(name, 1, full)
    assert after(name, 1, setting) == pytest.approx(expected, rel=1e-3)


ON_TWO = [name for name, pair in PAIRS.items() if pair.data_ranks is not None]


@pytest.mark.parametrize("name", ON_TWO)
def test_on_two_data_ranks_as_on_two_processes_before(name):
    pair = PAIRS[name]
    expected = before(name, 2, *pair.data_ranks, pair.full[0])
    found = after(name, 2, pair.full[1], args=pair.data_ranks)
    assert found == pytest.approx(expected, rel=pair.rel)


class LayoutAlone(phases.Work):
    def format(self, *_: Any) -> phases.Phase:
        return LEFT_OUT


LAYOUTS = [
    ("mnist", {"tensor": {"size": 2, "plan": {"fc1": "colwise", "fc2": "rowwise"}}}),
    ("nanogpt", {"pipeline": {"size": 2, "microbatches": 2, "partition": ["h.1"], "eval_outputs": "all"}}),
    ("imagenet", {"data": "zero1"}),
    ("clm", {"tensor": 2}),
    ("modded", {"data": "fsdp"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parallel"), LAYOUTS, ids=[f"{name}, {next(iter(axes))}" for name, axes in LAYOUTS])
def test_a_layout_trains_as_one_process(name, parallel, monkeypatch):
    monkeypatch.setattr(phases, "Work", LayoutAlone)
    script, config = ROOT / f"examples/own_loop/{name}_after.py", {"parallel": parallel}
    report = phases.verify_script(config, script, PAIRS[name].args, world_size=2, updates=1, timeout=120)
    assert report.equal, str(report)


def test_the_table_has_the_lines_that_were_changed():
    committed = {name: tuple(map(int, rest)) for name, *rest in ROW.findall(PAGE.read_text())}
    assert committed == {name: figures(name) for name in SCRIPTS}
