"""`halfmesh check`: checks that a config can run, and describes the run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..errors import ConfigError, InputError, counted

if TYPE_CHECKING:
    from ..config import Config
    from ..config.composition import Finding, Setup
    from ..dry_run.dry_run import DryRun


Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE: change a key, such as parallel.tensor=2; repeatable.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def check(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="The config: a .py, .yaml, .yml or .json file.")],
    world_size: Annotated[int, typer.Option(help="The number of ranks.")],
    overrides: Overrides = None,
    device: Annotated[str, typer.Option(help="The kind of device: cuda or cpu.")] = "cuda",
    model: Annotated[
        str | None, typer.Option(help="package.module:build, which builds the model: dry-run an update of it.")
    ] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option(help="With --model: an input of one data rank, such as 8,2048:int64; repeatable."),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="With --model: memory of one device, such as 80GB or 80GiB.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="With --model: draw what each rank holds, as an .svg file.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Check whether a config can run.

    Lists what is wrong with it. Needs no GPU. The exit status is 0 if the config can run (and fits, with --gpu-memory),
    else 1.

    With --model, one rank of each kind does an update on tensors without memory, which shows the bytes that it holds
    and sends. build() returns the model; or (model, inputs); or (model, (inputs, targets), criterion).
    """
    from ..compat import check_setup
    from ..config.composition import Setup, find_advice
    from ..engine.summary import parse_bytes

    if model is None and (batch or gpu_memory or picture):
        raise typer.BadParameter("--batch, --gpu-memory and --picture need --model")
    try:
        if picture is not None:
            from ..dry_run.rungs import refuse_target

            refuse_target("--picture", picture, force)
        limit = None if gpu_memory is None else parse_bytes(gpu_memory)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    run: DryRun | None = None
    with contextlib.redirect_stdout(sys.stderr):  # the output of a config or a model is not part of the answer
        loaded, problems = load(config, overrides or ())
        setup = Setup.of(loaded, world_size) if loaded else None
        findings = check_setup(setup, device) if setup else []
        right = setup is not None and not findings
        if loaded and right and model is not None:
            from ..dry_run.dry_run import dry_runs, workers

            with workers(is_fresh=bool(context.obj)) as over:
                (run,) = dry_runs(over, [(loaded, None)], world_size, model, tuple(batch or ()))
        if setup and setup.dims.dp > 1:
            findings += find_advice(setup)
    plan = _plan(setup) if setup and right and not (run and run.problems) else None
    answer = {"ok": plan is not None, "problems": problems, "findings": list(map(asdict, findings)), "plan": plan}
    lines: Sequence[str] = ()
    if model is not None:
        from ..dry_run import show

        answer |= {"model_problems": run.problems if run else [], "dry_run": None}
        if loaded and run and plan:
            answer |= {"ok": limit is None or show.fits(run, limit), "dry_run": show.as_json(run, limit)}
            lines = list(show.lines(run, limit))
            if picture is not None:
                show.draw(picture, loaded, run, model, tuple(batch or ()))
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        _print(config, world_size, answer, findings, lines)
    raise typer.Exit(0 if answer["ok"] else 1)


def say(text: str, style: str | None = None) -> None:
    """Print a line as it is; in colour on a terminal."""
    Console(highlight=False, emoji=False).print(text, style=style, markup=False, soft_wrap=True)


def load(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> tuple[Config | None, list[str]]:
    """The config, or its problems."""
    from ..config.load import load_config

    try:
        return load_config(source, overrides), []
    except ConfigError as error:
        return None, list(error.problems)


def _plan(setup: Setup) -> dict[str, Any]:
    """The layout and batch of the run, as plain values."""
    from ..parallel.data_strategy import DataStrategy
    from ..utils.tensors import dtype_name

    config, recipe, dims = setup.config, setup.recipe, setup.dims
    is_real = setup.strategy is not DataStrategy
    return {
        "mode": config.precision.label if config.precision else None,
        "dtype": dtype_name(recipe.compute_dtype) + (", products in float8" if recipe.linear else ""),
        "mesh": dims.sizes,
        "data_strategy": config.parallel.data.strategy if is_real else "replicate",
        "gradient_accumulation": config.gradient_accumulation,
        "global_batch_size": config.global_batch_size,
        "clip_grad_norm": config.clip_grad_norm.max_norm or None,
    }


def _print(
    path: Path, world_size: int, answer: dict[str, Any], findings: Sequence[Finding], dry_run: Sequence[str]
) -> None:
    from ..parallel.dims import in_words

    plan = answer["plan"]
    if plan is None:
        say(f"{path}: cannot run on {counted(world_size, 'rank')}", "red")
        for title, lines in (
            ("config problems", answer["problems"]),
            ("refused", [str(finding) for finding in findings if finding.kind == "refused"]),
            ("advice", [str(finding) for finding in findings if finding.kind == "advice"]),
            ("problems with the model", answer.get("model_problems")),
        ):
            if lines:
                say(f"{title}:", "bold")
            for line in lines or ():
                say(f"  - {line}")
        return
    fits, color = ("", "green") if answer["ok"] else (", but does not fit", "red")
    say(f"{path}: can run on {counted(world_size, 'rank')}{fits}", color)
    say(f"  mode {plan['mode'] or 'none'}, {plan['dtype']}")
    say(f"  mesh {in_words(plan['mesh'])}, data strategy {plan['data_strategy']}")
    total, cycle = plan["global_batch_size"], plan["gradient_accumulation"]
    batches = f"gradient_accumulation {cycle}" if total is None else f"global_batch_size {total}"
    say(f"  {batches}, clip_grad_norm {plan['clip_grad_norm'] or 'off'}")
    for finding in findings:
        say(f"  advice: {finding}", "yellow")
    for line in dry_run:
        say(line)
