"""`halfmesh check` and `halfmesh plan`: whether a config can run, and how it could; and what all commands share."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from ..errors import ConfigError, InputError, counted

if TYPE_CHECKING:
    from ..config import Config
    from ..config.composition import Finding, Setup
    from ..dry_run.dry_run import DryRun


MOST_RANKS = 2**14
"""The most ranks of a search: a dry run makes the groups of all, and takes minutes with more."""

MODEL = "package.module:build, timm:NAME or hf:config.json"
DEVICES = {"metavar": "[cuda|cpu]", "autocompletion": lambda: ["cuda", "cpu"]}
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, such as parallel.tensor=2; repeatable."),
]
Device = Annotated[str, typer.Option(help="Kind of device.", **DEVICES)]
Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Batch = Annotated[
    list[str] | None,
    typer.Option(metavar="SHAPE:DTYPE", help="An input of one data rank, such as 8,2048:int64; repeatable."),
]
Picture = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw what each rank holds, as an .svg file.")]


def check(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The config: a .py, .yaml, .yml or .json file.")],
    world_size: Annotated[int, typer.Option(metavar="N", help="Number of ranks.")],
    overrides: Overrides = None,
    device: Device = "cuda",
    model: Annotated[str | None, typer.Option(metavar="MODEL", help=f"{MODEL}. Simulates one update of it.")] = None,
    batch: Batch = None,
    gpu_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of one device, such as 80GB or 80GiB.")
    ] = None,
    picture: Picture = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Check whether a config can run.

    Lists every mistake in the config. Needs no GPU. The exit status is 0 if the config can run and, where you give the
    memory of a device, fits; else 1.

    Give --model to simulate one update with AdamW on one rank of each kind, without allocating memory. It shows the
    bytes that each rank holds and sends. build() returns the model; or (model, inputs); or (model, (inputs, targets),
    criterion). The options --batch, --gpu-memory and --picture need a model.
    """
    from ..compat import check_setup
    from ..config.composition import Setup, find_advice
    from ..dry_run import show
    from ..dry_run.candidates import reject_target
    from ..dry_run.dry_run import dry_runs, workers
    from ..engine.summary import parse_bytes

    if model is None and (batch or gpu_memory or picture):
        raise typer.BadParameter("--batch, --gpu-memory and --picture need --model")
    run: DryRun | None = None
    with usage_errors():
        reject_target("--picture", picture, ".svg", force)
        limit = None if gpu_memory is None else parse_bytes(gpu_memory)
        loaded, problems = load(config, overrides or ())
        setup = Setup.of(loaded, world_size) if loaded else None
        findings = check_setup(setup, device) if setup else []
        right = setup is not None and not findings
        if loaded and right and model is not None:
            with workers(is_fresh=bool(context.obj)) as over:
                (run,) = dry_runs(over, [(loaded, None)], world_size, model, tuple(batch or ()))
        if setup:
            findings += find_advice(setup)
    described = _describe(setup) if setup and right and not (run and run.problems) else None
    answer = {"ok": described is not None, "problems": problems, "findings": list(map(asdict, findings))}
    answer["plan"] = described
    lines: Sequence[str] = ()
    if model is not None:
        answer |= {"model_problems": run.problems if run else [], "dry_run": None}
        if loaded and run and described:
            answer |= {"ok": limit is None or show.fits(run, limit), "dry_run": show.as_json(run, limit)}
            lines = list(show.lines(run, limit, device))
            if picture is not None:
                show.draw(picture, loaded, run, model, tuple(batch or ()))
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        _print(config, world_size, answer, findings, lines)
    raise typer.Exit(0 if answer["ok"] else 1)


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Option(metavar="MODEL", help=f"{MODEL}.")],
    world_size: Annotated[int, typer.Option(metavar="N", min=1, max=MOST_RANKS, help="Number of ranks.")],
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of one device, such as 80GB or 80GiB.")],
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="The config to start from. By default it is empty.")
    ] = None,
    overrides: Overrides = None,
    batch: Batch = None,
    gpus_per_node: Annotated[
        int, typer.Option(metavar="N", min=1, help="Devices of a node. Tensor parallelism stays within a node.")
    ] = 8,
    device: Device = "cuda",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the chosen config to this .py file.")] = None,
    force: Force = False,
    picture: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Find the simplest change that makes a model fit.

    Tries changes to the config from the simplest to the most invasive, and stops at the first that fits. Each is
    simulated: one rank of each kind does an update without allocating memory. Reports what the chosen change costs.
    Needs no GPU. The exit status is 0 if something fits; 1 if nothing does, or if the config cannot run.

    build() returns (model, inputs); or (model, (inputs, targets), criterion); or, if you give --batch, the model alone.
    """
    from ..dry_run import candidates, show
    from ..dry_run.dry_run import workers
    from ..dry_run.ladder import search_layouts
    from ..engine.summary import parse_bytes

    with usage_errors():
        candidates.reject_target("--out", out, ".py", force)
        candidates.reject_target("--picture", picture, ".svg", force)
        limit, inputs, ladder = parse_bytes(gpu_memory), tuple(batch or ()), None
        loaded, problems = load({} if config is None else config, overrides or ())
        try:
            if loaded is not None:
                asked = candidates.PlanRequest(loaded, world_size, limit, model, inputs, gpus_per_node, device)
                with workers(is_fresh=bool(context.obj)) as over:
                    tuple(over(bool, (0,)))  # forks the pool, before a bar starts its thread
                    with _progress() as say_simulated:
                        ladder = search_layouts(asked, over, say_simulated)
        except ConfigError as error:
            problems = list(error.problems)
        chosen = None if ladder is None else ladder.chosen
        if ladder is not None and chosen is not None and ladder.update is not None and out is not None:
            candidates.write(out, candidates.config_text(chosen, asked, ladder.update), chosen.config)
    if ladder is None:
        answer = {"ok": False, "problems": problems, "plan": None}
        if as_json:
            print(json.dumps(answer, indent=2))
        else:
            _print(config or Path("the empty config"), world_size, answer, (), ())
        raise typer.Exit(1)
    if chosen is not None and chosen.run is not None and picture is not None:
        show.draw(picture, chosen.config, chosen.run, model, inputs, gpus_per_node)
    if as_json:
        print(json.dumps(show.ladder_as_json(ladder, asked), indent=2))
    else:
        style = None
        for line in show.ladder_lines(ladder, asked):
            style = style if line else "bold green"  # after an empty line comes the config
            say(line, style or {"     fits": "green", "nothing f": "red"}.get(line[:9]))
        if chosen is not None and out is not None:
            say(f"written: {out}")
    raise typer.Exit(0 if chosen is not None else 1)


@contextmanager
def _progress() -> Iterator[Callable[[str, int | None], None]]:
    """Shows on stderr what is simulated, as number N of up to M: on a terminal in one line, with the time, that is
    removed at the end; else in a line for each."""
    console, count = Console(stderr=True, highlight=False, emoji=False), itertools.count(1)

    def name(about: int | None) -> str:
        number = next(count)
        return f"simulating {number}" + ("" if about is None else f" of up to {max(about, number)}")

    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda changes, about: print(f"{name(about)}: {changes}", file=sys.stderr, flush=True)
        return
    columns = [
        TextColumn("{task.description},", markup=False),
        _Elapsed(),
        TextColumn("{task.fields[changes]}", style="dim", markup=False, table_column=Column(no_wrap=True)),
    ]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("simulating", changes="")
        yield lambda changes, about: bar.update(task, description=name(about), changes=changes)


class _Elapsed(ProgressColumn):
    """The time since the start: 0:12."""

    def render(self, task: Task) -> Text:
        return Text("{}:{:02}".format(*divmod(int(task.elapsed or 0), 60)))


@contextmanager
def usage_errors() -> Iterator[None]:
    """A scope in which wrong input is an error of the command line. The output of configs and models goes to stderr,
    because it is not part of the answer."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (ConfigError, InputError) as error:
        raise typer.BadParameter(str(error)) from None


def say(text: str, style: str | None = None) -> None:
    """Print a line as it is; in color on a terminal."""
    Console(highlight=False, emoji=False).print(text, style=style, markup=False, soft_wrap=True)


def load(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> tuple[Config | None, list[str]]:
    """The config, or its problems.

    Raises:
        UnreadableError: its file cannot be read.
    """
    from ..config.load import load_config
    from ..config.text import UnreadableError

    try:
        return load_config(source, overrides), []
    except UnreadableError:
        raise
    except ConfigError as error:
        return None, list(error.problems)


def _describe(setup: Setup) -> dict[str, Any]:
    """The layout and batch of the run, as plain values."""
    from ..parallel.data_strategy import DataStrategy
    from ..utils.tensors import dtype_name

    config, recipe, dims = setup.config, setup.recipe, setup.dims
    is_real = setup.strategy is not DataStrategy
    return {
        "mode": config.precision.label if config.precision else None,
        "dtype": dtype_name(recipe.compute_dtype) + (", products in float8" if recipe.linear else ""),
        "mesh": dims.sizes,
        "views": dict(dims.views),
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
        kinds = {kind: [one for one in findings if one.kind == kind] for kind in ("rejected", "advice")}
        rows = {"config problems": answer["problems"], **kinds, "problems with the model": answer.get("model_problems")}
        for title, found in rows.items():
            if found:
                say("\n".join([f"{title}:", *(f"  - {one}" for one in found)]))
        return
    fits, color = ("", "green") if answer["ok"] else (", but does not fit", "red")
    say(f"{path}: can run on {counted(world_size, 'rank')}{fits}", color)
    say(f"  mode {plan['mode'] or 'none'}, {plan['dtype']}")
    say(f"  mesh {in_words(plan['mesh'], plan['views'].items())}, data strategy {plan['data_strategy']}")
    total, cycle = plan["global_batch_size"], plan["gradient_accumulation"]
    batches = f"gradient_accumulation {cycle}" if total is None else f"global_batch_size {total}"
    say(f"  {batches}, clip_grad_norm {plan['clip_grad_norm'] or 'off'}")
    for finding in findings:
        say(f"  advice: {finding}", "yellow")
    for line in dry_run:
        say(line)
