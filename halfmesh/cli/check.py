"""`halfmesh check`: whether a config can run, and what a run of it would be."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

if TYPE_CHECKING:
    from ..config import Config
    from ..key_checks import Finding


def check(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="The config: a .py, .yaml, .yml or .json file.")],
    world_size: Annotated[int, typer.Option(help="The number of ranks the run would have.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE, such as parallel.tensor=2; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="The kind of device: cuda or cpu.")] = "cuda",
    model: Annotated[
        str | None, typer.Option(help="package.module:build, which builds the model: plan a whole update with it.")
    ] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option(help="With --model: an input as a data rank's loader gives it, such as 8,2048:int64; repeatable."),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="With --model: what one device has, such as 80GB or 80GiB.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="With --model: draw what each rank holds, as an .svg file.")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="With --picture: mark the nodes, of so many devices.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="With --picture: replace a file that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether a config can run, and what is wrong with it.

    All mistakes are listed at once. Needs no GPU. The exit status is 0 if the config can run (with --gpu-memory: and
    fits), else 1.

    With --model one rank of each kind does an update on tensors without memory: what it holds, and what it sends.
    build() returns the model; or (model, inputs); or (model, (inputs, targets), criterion).
    """
    from ..compat import check as find
    from ..compat import get_layout
    from ..config.load import load_leniently
    from ..key_checks import find_advice

    if picture is None and (force or gpus_per_node is not None):
        raise typer.BadParameter("--gpus-per-node and --force say something about --picture, which is missing")
    if model is None and (batch or gpu_memory or picture):
        raise typer.BadParameter("--batch, --gpu-memory and --picture say something about --model, which is missing")
    with contextlib.redirect_stdout(sys.stderr):  # what a config or a model prints is not part of the answer
        loaded, problems = load_leniently(config, overrides or ())
        findings = find(loaded, world_size, device) if loaded else []
        right = bool(loaded) and not problems and not findings
        if loaded and get_layout(loaded, world_size).data > 1:
            findings += find_advice(loaded)
        run = _DryRun()
        if model is not None:
            asked = _Asked(model, tuple(batch or ()), gpu_memory, picture, gpus_per_node, force)
            run = _dry_run(loaded, right, world_size, device, asked, bool(context.obj))
    plan = _plan(loaded, world_size) if loaded and right and not run.problems else None
    if as_json:
        answer = _as_json(problems, findings, plan)
        if model is not None:
            answer |= {"ok": plan is not None and run.fits, "model_problems": run.problems, "dry_run": run.answer}
        print(json.dumps(answer, indent=2))
    else:
        _print(config, world_size, problems, findings, plan, run)
    raise typer.Exit(0 if plan and run.fits else 1)


class _Asked(NamedTuple):
    """The options about a model."""

    model: str
    batch: tuple[str, ...]
    memory: str | None
    picture: Path | None
    node: int | None
    force: bool


class _DryRun(NamedTuple):
    """What a dry run of the model has found; without a model nothing."""

    problems: Sequence[str] = ()
    fits: bool = True
    lines: Sequence[str] = ()
    answer: dict[str, Any] | None = None


def _dry_run(
    config: Config | None, right: bool, world_size: int, device: str, asked: _Asked, is_fresh: bool
) -> _DryRun:
    """Run the model, if the config can run; draw the picture."""
    from ..errors import InputError
    from ..memory import parse_bytes
    from ..plan import dry_run, picture, show

    try:
        if asked.picture is not None:
            picture.refuse_path(asked.picture, asked.force)
        limit = None if asked.memory is None else parse_bytes(asked.memory)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    if config is None:
        return _DryRun()
    if not right:
        return _DryRun(dry_run.find_model_problems(config, world_size, asked.model))
    run = dry_run.dry_run(config, world_size, asked.model, asked.batch, is_fresh)
    if run.problems:
        return _DryRun(run.problems)
    fits = limit is None or show.fits(run, limit)
    if asked.picture is not None:
        picture.draw(asked.picture, config, run, asked.model, asked.batch, asked.node)
    return _DryRun([], fits, list(show.lines(run, limit)), show.as_json(run, limit))


def _plan(config: Config, world_size: int) -> dict[str, Any]:
    """What the run would be."""
    from ..key_checks import recipe_of
    from ..mesh_picture import mesh_sizes

    return {
        "mode": config.precision.label if config.precision else None,
        "dtype": str(recipe_of(config).compute_dtype).removeprefix("torch."),
        "mesh": mesh_sizes(config, world_size),
        "data_strategy": config.parallel.data.strategy,
        "gradient_accumulation": config.gradient_accumulation,
        "global_batch_size": config.global_batch_size,
        "clip_grad_norm": config.clip_grad_norm.max_norm or None,
    }


def _as_json(problems: list[str], findings: list[Finding], plan: dict[str, Any] | None) -> dict[str, Any]:
    rows = [{"kind": finding.kind, "where": finding.where, "message": finding.message} for finding in findings]
    return {"ok": plan is not None, "problems": problems, "findings": rows, "plan": plan}


def _print(
    path: Path,
    world_size: int,
    problems: list[str],
    findings: list[Finding],
    plan: dict[str, Any] | None,
    run: _DryRun,
) -> None:
    from ..mesh_picture import in_words

    console = Console(highlight=False)

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    if plan is None:
        say(f"{path}: cannot run on {world_size} rank(s)", "red")
        for title, lines in (
            ("config problems", problems),
            ("refused", [str(finding) for finding in findings if finding.kind == "refused"]),
            ("advice", [str(finding) for finding in findings if finding.kind == "advice"]),
            ("problems with the model", run.problems),
        ):
            if lines:
                say(f"{title}:", "bold")
            for line in lines:
                say(f"  - {line}")
        return
    fits, color = ("", "green") if run.fits else (", but does not fit", "red")
    say(f"{path}: can run on {world_size} rank(s){fits}", color)
    mesh = in_words(plan["mesh"])
    say(f"  mode {plan['mode'] or 'none'}, {plan['dtype']}")
    say(f"  mesh {mesh}, data strategy {plan['data_strategy']}")
    total, cycle = plan["global_batch_size"], plan["gradient_accumulation"]
    batches = f"gradient_accumulation {cycle}" if total is None else f"global_batch_size {total}"
    say(f"  {batches}, clip_grad_norm {plan['clip_grad_norm'] or 'off'}")
    for finding in findings:
        say(f"  advice: {finding}", "yellow")
    for line in run.lines:
        say(line)
