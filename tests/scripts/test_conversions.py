"""The known scripts of examples/own_loop, before and after their conversion, train alike in every config."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest

from tests.support.example_runs import launch, numbers

from .conversions import SCRIPTS, committed_figures, figures

pytestmark = pytest.mark.distributed

DATA_LAYOUTS = ["replicate", "zero1", "fsdp"]
ALL, EVALUATED = r"loss (\d\S+)", r"(?:test:|val|validation:) loss (\d[\d.]+)"
MLP_PLAN = "parallel.tensor={size: 2, plan: {fc1: colwise, fc2: rowwise}}"
GPT_PLAN = (
    "parallel.tensor={size: 2, plan: {h.*.attn.c_attn: fused_colwise(3), h.*.attn.c_proj: rowwise, "
    "h.*.c_fc: colwise, h.*.c_proj: rowwise}}"
)


def pipeline(start: str) -> str:
    return f"parallel.pipeline={{size: 2, microbatches: 2, partition: [{start}], eval_outputs: all}}"


class Short(NamedTuple):
    """Options that make a script short, and by which ranks do not draw their own dropout."""

    args: tuple[object, ...]
    divided: dict[str, str]


SHORT = {
    "mnist": Short(("--epochs", 2, "--dropout", 0, "--lr", 0.3), {"tensor": MLP_PLAN, "pipeline": pipeline("fc1")}),
    "nanogpt": Short((), {"tensor": GPT_PLAN, "pipeline": pipeline("h.1")}),
    "imagenet": Short(("--epochs", 2), {}),
}


@cache
def printed(script: str, ranks: int, *args: object) -> str:
    name = script.partition("_")[0]
    return launch(f"own_loop/{script}.py", ranks, *SHORT[name].args, *args)[0].replace(",", "")


def losses(script: str, ranks: int, *args: object, pattern: str = ALL) -> list[float]:
    return numbers(pattern, printed(script, ranks, *args))


@pytest.fixture(scope="module", params=SHORT)
def name_and_losses(request):
    found = losses(f"{request.param}_before", 1)
    assert found[-1] < found[0] - 0.1, "it learns"
    return request.param, found


@pytest.mark.promise(
    "existing scripts",
    "nanoGPT's script, mnist, imagenet (data ranks), and the word model's LSTM and Transformer train as "
    "before in one process, and by config alone on 2 data ranks, tensor 2, pipeline 2 and fsdp",
    of="Colossal-AI",
    page="loop.md",
)
def test_in_one_process_fp32_is_the_same(name_and_losses):
    name, expected = name_and_losses
    found = losses(f"{name}_after", 1)
    if name == "mnist":
        assert found == expected, "with the same kernels to the last digit"
    assert found == pytest.approx(expected, rel=2e-3 if name == "imagenet" else 1e-5)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_in_half_precision_it_learns_alike(name_and_losses, precision):
    name, expected = name_and_losses
    found = losses(f"{name}_after", 1, "--set", f"{precision}.mode=torch")
    assert found != expected
    assert found == pytest.approx(expected, rel=0.05, abs=0.05)


DIVIDED = [(name, layout) for name, short in SHORT.items() for layout in short.divided]


@pytest.mark.promise("existing scripts")
@pytest.mark.parametrize(("name", "layout"), DIVIDED)
def test_a_divided_model_trains_alike(name, layout):
    found = losses(f"{name}_after", 2, "--set", SHORT[name].divided[layout])
    assert found == pytest.approx(losses(f"{name}_before", 1), rel=1e-4)


@pytest.mark.parametrize("data", DATA_LAYOUTS)
def test_mnist_on_two_data_ranks_trains_as_one_process(data):
    found = losses("mnist_after", 2, "--batch-size", 16, "--set", f"parallel.data={data}", pattern=EVALUATED)
    assert found == pytest.approx(losses("mnist_before", 1, pattern=EVALUATED), rel=1e-4)


@pytest.mark.promise("existing scripts")
@pytest.mark.parametrize("data", DATA_LAYOUTS)
def test_nanogpt_on_two_data_ranks_trains_as_under_ddp(data):
    """Without evaluation, for which the script before it draws batches on rank 0 only."""
    found = losses("nanogpt_after", 2, "--eval-interval", 0, "--set", f"parallel.data={data}")
    assert found == pytest.approx(losses("nanogpt_before", 2, "--eval-interval", 0), rel=1e-5)


@pytest.mark.parametrize("data", DATA_LAYOUTS)
def test_imagenet_on_two_data_ranks_learns_as_under_ddp(data):
    """The order of the samples is another than DistributedSampler's, and BatchNorm sees half a batch."""
    found = losses("imagenet_after", 2, "--set", f"parallel.data={data}", pattern=EVALUATED)
    assert len(found) == 2
    assert max(found[-1], losses("imagenet_before", 2, pattern=EVALUATED)[-1]) < 0.2


def test_imagenet_resumes_exactly(tmp_path):
    whole = losses("imagenet_after", 1, "--epochs", 3)
    begun = losses("imagenet_after", 1, "--epochs", 2, "--out", tmp_path)
    rest = losses("imagenet_after", 1, "--epochs", 3, "--out", tmp_path, "--resume")
    assert begun + rest == whole
    evaluated = losses("imagenet_after", 1, "--out", tmp_path, "--resume", "--evaluate")
    assert evaluated == whole[-1:]
    assert (tmp_path / "best").is_dir()


def test_the_table_has_the_lines_that_were_changed():
    assert committed_figures() == {name: figures(name) for name in SCRIPTS}
