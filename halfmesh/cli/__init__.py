"""The command line: `halfmesh check config.py --world-size 8`. torch is imported only by the commands that need it."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from ..config import Config
    from ..key_checks import Finding

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _commands() -> None:
    """halfmesh: any precision mode with any parallel layout, from one config."""


@app.command(epilog="Example: halfmesh check config.py --world-size 8 --device cuda")
def check(
    config: Annotated[Path, typer.Argument(help="The config: a .py, .yaml, .yml or .json file.")],
    world_size: Annotated[int, typer.Option(help="The number of ranks the run would have.")],
    device: Annotated[str, typer.Option(help="The kind of device: cuda or cpu.")] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether a config can run, and list everything that is wrong with it.

    Needs no GPU and starts no process. The exit status is 0 if the config can run, else 1.
    """
    from ..compat import check as find
    from ..config.load import load_leniently

    with contextlib.redirect_stdout(sys.stderr):  # what a .py config prints is not part of the answer
        loaded, problems = load_leniently(config)
    findings = find(loaded, world_size, device) if loaded else []
    plan = _plan(loaded, world_size) if loaded and not problems and not findings else None
    if as_json:
        print(json.dumps(_as_json(problems, findings, plan), indent=2))
    else:
        _print(config, world_size, problems, findings, plan)
    raise typer.Exit(0 if plan else 1)


def main() -> None:
    """The console script `halfmesh`."""
    app()


def _plan(config: Config, world_size: int) -> dict[str, Any]:
    """What the run would be."""
    from ..compat import get_layout
    from ..key_checks import recipe_of

    layout = get_layout(config, world_size)
    return {
        "mode": config.precision.label if config.precision else None,
        "dtype": str(recipe_of(config).compute_dtype).removeprefix("torch."),
        "mesh": {"pp": layout.pipeline, "dp": layout.data, "tp": layout.tensor},
        "data_strategy": config.parallel.data.strategy,
        "gradient_accumulation": config.gradient_accumulation,
        "clip_grad_norm": config.clip_grad_norm.max_norm or None,
    }


def _as_json(problems: list[str], findings: list[Finding], plan: dict[str, Any] | None) -> dict[str, Any]:
    rows = [{"kind": finding.kind, "where": finding.where, "message": finding.message} for finding in findings]
    return {"ok": plan is not None, "problems": problems, "findings": rows, "plan": plan}


def _print(
    path: Path, world_size: int, problems: list[str], findings: list[Finding], plan: dict[str, Any] | None
) -> None:
    console = Console(highlight=False)

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    if plan:
        mesh = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
        say(f"{path}: can run on {world_size} rank(s)", "green")
        say(f"  mode {plan['mode'] or 'none'}, {plan['dtype']}")
        say(f"  mesh {mesh}, data strategy {plan['data_strategy']}")
        clip = plan["clip_grad_norm"] or "off"
        say(f"  gradient_accumulation {plan['gradient_accumulation']}, clip_grad_norm {clip}")
        return
    say(f"{path}: cannot run on {world_size} rank(s)", "red")
    refused = [str(finding) for finding in findings if finding.kind == "refused"]
    unbuilt = [str(finding) for finding in findings if finding.kind == "unbuilt"]
    for title, lines in (("config problems", problems), ("refused", refused), ("not built yet", unbuilt)):
        if lines:
            say(f"{title}:", "bold")
        for line in lines:
            say(f"  - {line}")
