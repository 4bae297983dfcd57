"""What people train today, in examples/own_loop: before and after its conversion a script prints the same figures."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from halfmesh.distributed.local_ranks import free_port
from tests.support.example_runs import as_main, numbers
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

FIGURES = r"(?:loss|centre|norm|lr|wd|perplexity) (\d\S+)"
EVALUATED = r"(?:eval loss|perplexity) (\d\S+)"
FP16 = "fp16={mode: torch, init_scale: 65536}"  # GradScaler's
REPLICATE, ZERO1, FSDP = DATA = ("parallel.data=replicate", "parallel.data=zero1", "parallel.data=fsdp")


class Pair(NamedTuple):
    """A script before and after its conversion.

    Attributes:
        needs: packages.
        half: the option of the script before for half precision, and the same in the config of the one after.
        layouts: of two ranks; both scripts draw the same batches there.
        rel: what rounding makes of the figures in fp32.
        full: as `half`, for fp32.
    """

    needs: tuple[str, ...]
    half: tuple[str, str]
    layouts: tuple[str, ...] = ()
    rel: float = 1e-5
    full: tuple[str, str] = ("", "")


PAIRS = {
    "clm": Pair(("accelerate", "transformers"), ("--mixed-precision=bf16", "bf16.mode=torch")),
    "dino": Pair(("timm",), ("--use-fp16", FP16), (REPLICATE, FSDP)),
    "mae": Pair(("timm",), ("--use-fp16", FP16), DATA, rel=1e-4),
    "modded": Pair((), ("", "bf16.mode=torch"), DATA, rel=1e-4, full=("--dtype=float32", "bf16=null")),
    "timm": Pair(("timm",), ("--amp", FP16), (REPLICATE,)),
}


@cache
def printed(script: str, ranks: int, *args: str) -> str:
    """What rank 0 prints, without the options that are empty."""
    args = tuple(arg for arg in args if arg)
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


def after(name: str, ranks: int, *settings: str) -> list[float]:
    return numbers(FIGURES, printed(f"{name}_after", ranks, *(f"--set={one}" for one in settings if one)))


def needed(name: str) -> Pair:
    if missing := [package for package in PAIRS[name].needs if find_spec(package) is None]:
        pytest.skip(f"no {' and '.join(missing)} here")
    return PAIRS[name]


def slow_unless(quick: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    quick = list(quick)
    return [pytest.param(*case, marks=[] if case in quick else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("name", slow_unless(zip(PAIRS.keys() - {"clm"}), zip(PAIRS)))  # its imports take 10 s
def test_in_one_process(name):
    _, _, _, rel, (option, setting) = needed(name)
    assert after(name, 1, setting) == pytest.approx(before(name, 1, option), rel=rel)


@pytest.mark.parametrize("name", slow_unless(zip(["dino", "timm"]), zip(PAIRS)))
def test_in_half_precision(name):
    _, (option, setting), _, _, (full, _) = needed(name)
    expected = before(name, 1, option)
    assert expected != before(name, 1, full)
    assert after(name, 1, setting) == pytest.approx(expected, rel=1e-3)


LAYOUTS = [(name, layout) for name in PAIRS for layout in PAIRS[name].layouts]


@pytest.mark.parametrize(("name", "layout"), slow_unless([(name, REPLICATE) for name in PAIRS], LAYOUTS))
def test_on_two_ranks_as_on_two_processes_before(name, layout):
    _, _, _, rel, (option, setting) = needed(name)
    assert after(name, 2, layout, setting) == pytest.approx(before(name, 2, option), rel=rel)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "batch"), [*((layout, 2) for layout in DATA), ("parallel.tensor=2", 4)])
def test_clm_on_two_ranks_as_in_one_process_before(layout, batch, tmp_path):
    """Accelerate draws another order on two."""
    needed("clm")
    load_file = pytest.importorskip("safetensors.torch").load_file
    folders = [tmp_path / side for side in ("before", "after")]
    expected = printed("clm_before", 1, f"--output-dir={folders[0]}")
    options = f"--set={layout}", f"--per-device-batch-size={batch}", f"--output-dir={folders[1]}"
    found = printed("clm_after", 2, *options)
    assert numbers(EVALUATED, found) == pytest.approx(numbers(EVALUATED, expected), rel=1e-5)
    files = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert files[0] == files[1]
    written = [load_file(folder / "model.safetensors") for folder in folders]
    torch.testing.assert_close(written[1], written[0], rtol=1e-3, atol=1e-4)
