"""`halfmesh init`: asks a few questions and writes a config that can run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.prompt import FloatPrompt, IntPrompt, Prompt

from ..errors import InputError, counted
from .check import Force, say, usage_errors

PRECISIONS = ("bf16", "fp16", "fp32", "fp8")
LAYOUTS = {
    "replicate": "each rank holds the whole model",
    "zero1": "shards the optimizer's state",
    "fsdp": "shards weights, gradients and the optimizer's state",
    "tensor": "splits each layer, over ranks of one node",
    "pipeline": "splits the layers into stages",
}


def init(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .py file to write.")] = Path("config.py"),
    force: Force = False,
) -> None:
    """Ask a few questions and write a config.

    Press Enter to take the answer in brackets. halfmesh checks the config before it writes it.
    """
    from ..compat import check, raise_for
    from ..config.load import load_config
    from ..dry_run.candidates import reject_target

    with usage_errors():
        reject_target("OUT", out, ".py", force)
        try:
            ranks = IntPrompt.ask("Number of GPUs, or processes, in total", default=1)
            keys = _ask_precision() | (_ask_layout(ranks) if ranks > 1 else {}) | _ask_update()
        except EOFError:
            print(file=sys.stderr)  # after the question
            raise InputError(
                f"the input ended before the last answer, so {out} is not written; run halfmesh init in a terminal, or "
                "start from one of `halfmesh configs`"
            ) from None
        text = _render(keys, out.name, ranks)
        raise_for(check(load_config(keys), ranks), "these answers")
        out.write_text(text, encoding="utf-8")
    say(f"{out}: written, for {counted(ranks, 'rank')}. Next:", "green")
    say(f"  halfmesh check {out} --world-size {ranks} --model package.module:build   # what does your model need?")
    say(f"  halfmesh verify {out} --world-size {ranks} --model package.module:build  # does it equal one process?")


def _ask_precision() -> dict[str, Any]:
    precision = Prompt.ask("Precision", choices=[*PRECISIONS], default="bf16")
    if precision == "fp32":
        return {}
    mode = "torch"
    if precision != "fp8":
        say("  torch  autocast, weights in fp32")
        say("  naive  weights in half precision, with fp32 master weights; faster")
        mode = Prompt.ask("Mode", choices=["torch", "naive"], default="torch")
    return {precision: {"mode": mode}}


def _ask_layout(ranks: int) -> dict[str, Any]:
    for name, what in LAYOUTS.items():
        say(f"  {name:9}  {what}")
    layout = Prompt.ask("Layout", choices=[*LAYOUTS], default="replicate")
    if layout in ("tensor", "pipeline"):
        size = IntPrompt.ask(f"Over how many of the {ranks} ranks", default=min(ranks, 8))
        stages = {"size": size, "microbatches": 2 * size}
        return {"parallel": {layout: size if layout == "tensor" else stages}}
    return {} if layout == "replicate" else {"parallel": {"data": layout}}


def _ask_update() -> dict[str, Any]:
    cycle = IntPrompt.ask("Batches per rank and update (gradient accumulation)", default=1)
    norm = FloatPrompt.ask("Clip the gradient norm at (0: off)", default=1.0)
    folder = Prompt.ask("Folder for checkpoints (none: off)", default="checkpoints")
    keys: dict[str, Any] = {} if cycle == 1 else {"gradient_accumulation": cycle}
    keys |= {"clip_grad_norm": norm} if norm else {}
    return keys | ({"checkpoint": {"directory": folder, "every": 1000}, "resume": "auto"} if folder != "none" else {})


def _render(keys: dict[str, Any], name: str, ranks: int) -> str:
    from ..config.text import as_python

    start = "python" if ranks == 1 else f"torchrun --standalone --nproc-per-node {min(ranks, 8)}"
    about = {
        "parallel": "  # the remaining ranks are data-parallel ranks",
        "gradient_accumulation": "  # batches per update",
        "checkpoint": "  # saved every 1000 updates, and when a signal ends the run",
    }
    lines = [f"{key} = {as_python(value)}{about.get(key, '')}" for key, value in keys.items()]
    head = f'"""For `{start} train.py`, which calls halfmesh.initialize(..., config="{name}")."""'
    return "\n".join([head, "", *lines]) + "\n"
