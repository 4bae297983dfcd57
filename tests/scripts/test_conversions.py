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

from .conversions import SCRIPTS, committed_figures, figures

pytestmark = pytest.mark.distributed

FIGURES = r"(?:loss|centre|norm|lr|wd|perplexity) (\d[\d.e+-]*)"
FP16 = "fp16={mode: torch, init_scale: 65536}"  # GradScaler's
MLP_PLAN = {"fc1": "colwise", "fc2": "rowwise"}
GPT_PLAN = {
    "h.*.attn.c_attn": "fused_colwise(3)",
    "h.*.attn.c_proj": "rowwise",
    "h.*.c_fc": "colwise",
    "h.*.c_proj": "rowwise",
}
ZERO1, FSDP = {"data": "zero1"}, {"data": "fsdp"}


class Pair(NamedTuple):
    """A script before and after its conversion.

    Attributes:
        args: of both, which make it short.
        needs: packages.
        half: the option of the script before for half precision, and the same in the config of the one after.
        full: as `half`, for fp32.
        data_ranks: whether both draw the same batches on two of them; further options for that.
        rel: what rounding makes of the figures in fp32; 0: nothing.
    """

    args: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    half: tuple[str, str] | None = None
    full: tuple[str, str] = ("", "")
    data_ranks: tuple[str, ...] | None = None
    rel: float = 1e-5


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


def with_slow(names: list[str], quick: set[str]) -> Any:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", with_slow([*PAIRS], PAIRS.keys() - {"clm"}))  # whose imports take 10 s
def test_in_one_process_fp32_is_the_same(name):
    option, setting = PAIRS[name].full
    expected = before(name, 1, option)
    assert after(name, 1, setting) == pytest.approx(expected, rel=PAIRS[name].rel, abs=0)


@pytest.mark.parametrize("name", with_slow([name for name, pair in PAIRS.items() if pair.half], {"dino", "timm"}))
def test_in_half_precision(name):
    (option, setting), (full, _) = PAIRS[name].half, PAIRS[name].full
    expected = before(name, 1, option)
    assert expected != before(name, 1, full)
    assert after(name, 1, setting) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("name", "setting"), [("mnist", "fp16.mode=torch"), ("nanogpt", "bf16.mode=torch")])
def test_half_precision_that_the_script_did_not_have(name, setting):
    expected, found = before(name, 1), after(name, 1, setting)
    assert found != expected
    assert found == pytest.approx(expected, rel=0.05, abs=0.05)


ON_TWO = [(name, "replicate") for name, pair in PAIRS.items() if pair.data_ranks is not None]


@pytest.mark.parametrize(("name", "strategy"), [*ON_TWO, pytest.param("mae", "fsdp", marks=pytest.mark.slow)])
def test_on_two_data_ranks_as_on_two_processes_before(name, strategy):
    pair = PAIRS[name]
    expected = before(name, 2, *pair.data_ranks, pair.full[0])
    found = after(name, 2, f"parallel.data={strategy}", pair.full[1], args=pair.data_ranks)
    assert found == pytest.approx(expected, rel=pair.rel)


class LayoutAlone(phases.Work):
    """Proves the layout, in float64."""

    def format(self, *_: Any) -> phases.Phase:
        return LEFT_OUT


def staged(start: str) -> dict[str, Any]:
    return {"pipeline": {"size": 2, "microbatches": 2, "partition": [start], "eval_outputs": "all"}}


LAYOUTS = [
    ("mnist", {"tensor": {"size": 2, "plan": MLP_PLAN}}),
    ("mnist", staged("fc1")),
    ("mnist", {"data": "replicate"}),
    ("nanogpt", {"tensor": {"size": 2, "plan": GPT_PLAN}}),
    ("nanogpt", staged("h.1")),
    ("nanogpt", FSDP),
    ("imagenet", ZERO1),
    ("clm", {"tensor": 2}),
    ("modded", FSDP),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parallel"), LAYOUTS, ids=[f"{name}, {next(iter(axes))}" for name, axes in LAYOUTS])
def test_a_layout_trains_as_one_process(name, parallel, monkeypatch):
    monkeypatch.setattr(phases, "Work", LayoutAlone)
    script, config = ROOT / f"examples/own_loop/{name}_after.py", {"parallel": parallel}
    report = phases.verify_script(config, script, PAIRS[name].args, world_size=2, updates=1, timeout=120)
    assert report.equal, str(report)
    assert report.phases[0].compared > 10


@pytest.mark.slow
def test_clm_writes_the_same_folder_from_two_ranks(tmp_path):
    """As one process before: Accelerate draws another order on two."""
    folders = [tmp_path / side for side in ("before", "after")]
    expected = before("clm", 1, f"--output-dir={folders[0]}")
    options = ("--per-device-batch-size=4", f"--output-dir={folders[1]}")
    assert after("clm", 2, "parallel.tensor=2", args=options)[-1] == pytest.approx(expected[-1], rel=1e-5)
    files = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert files[0] == files[1]
    load_file = pytest.importorskip("safetensors.torch").load_file
    written = [load_file(folder / "model.safetensors") for folder in folders]
    torch.testing.assert_close(written[1], written[0], rtol=1e-3, atol=1e-4)


def test_imagenet_resumes_exactly(tmp_path):
    whole = after("imagenet", 1, args=("--epochs=3",))
    begun = after("imagenet", 1, args=(f"--out={tmp_path}",))
    rest = after("imagenet", 1, args=("--epochs=3", f"--out={tmp_path}", "--resume"))
    assert begun + rest == whole
    evaluated = after("imagenet", 1, args=(f"--out={tmp_path}", "--resume", "--evaluate"))
    assert evaluated == whole[-len(evaluated) :]
    assert (tmp_path / "best").is_dir()


def test_the_table_has_the_lines_that_were_changed():
    assert committed_figures() == {name: figures(name) for name in SCRIPTS}
