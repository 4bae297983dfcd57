"""`halfmesh verify`: checks that a layout computes the same as one process."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..errors import ConfigError, HalfmeshError
from .check import AsJson, Overrides, say

if TYPE_CHECKING:
    from ..verify import VerifyReport


def verify(
    config: Annotated[Path | None, typer.Argument(help="The config; without one, this machine is verified.")] = None,
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS...", help="With --script: what the script is given.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="package.module:build, which builds the model and its inputs.")
    ] = None,
    script: Annotated[Path | None, typer.Option(help="A training script, which is run as it is.")] = None,
    world_size: Annotated[int | None, typer.Option(help="The number of ranks of the layout.")] = None,
    updates: Annotated[int, typer.Option(min=1, help="How many are compared.")] = 2,
    overrides: Overrides = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="With --model: package.module:function of the parameters; else SGD with momentum."),
    ] = None,
    accumulated: Annotated[
        bool,
        typer.Option("--accumulated", help="Beside one process that accumulates the ranks' batches and microbatches."),
    ] = False,
    shrink: Annotated[
        bool | None,
        typer.Option("--shrink/--no-shrink", help="At most 2 ranks on each axis; by default on the CPU."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; without a config, cuda if there is one.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that each run may take.")] = 600,
    quick: Annotated[bool, typer.Option("--quick", help="Without a config: in a minute.")] = False,
    as_json: AsJson = False,
) -> None:
    """Prove that a layout computes the same as one process.

    Trains the model for a few updates in one process, and in the layout on ranks of this machine, and compares what
    each module and each update computes. Says where it differs first. The exit status is 0 if all is equal, 1 if
    something differs or is refused.

    build() returns (model, inputs); or (model, (inputs, targets), criterion); a list instead of the second is of
    batches. With --script a training script replaces the model. Without a config, small models are trained in the modes
    and layouts that this machine can run.
    """
    given = (model, script, world_size, overrides, optimizer, accumulated)
    if config is None and (any(given) or shrink is not None):
        raise typer.BadParameter("without a config this machine is verified: only --device, --quick and --json fit")
    if config is not None and (model is None) == (script is None):
        raise typer.BadParameter("give --model or --script: what is trained")
    if config is not None and world_size is None:
        raise typer.BadParameter("give --world-size: the number of ranks of the layout")
    if config is not None and quick:
        raise typer.BadParameter("--quick is for this machine, without a config")
    if script is None and args:
        raise typer.BadParameter(f"{' '.join(args)}: only a --script takes arguments")
    if script is not None and optimizer:
        raise typer.BadParameter("--optimizer is for --model; a script makes its own")
    if device not in (None, "cpu", "cuda"):
        raise typer.BadParameter(f"--device {device}: use cpu or cuda")
    options: dict[str, Any] = {"updates": updates, "overrides": overrides or (), "shrink": shrink, "timeout": timeout}
    report: Any
    # The output of configs and models is not part of the answer.
    with _cleaned_up(), contextlib.redirect_stdout(sys.stderr), _progress(hidden=config is None) as options["progress"]:
        if config is None:
            from ..verify.machine import verify_machine

            report = verify_machine(device, quick)
        else:
            options |= {"device": device or "cpu", "world_size": world_size, "accumulated": accumulated}
            if model is not None:
                from ..verify import verify as verify_model

                report = _told(verify_model, config, model, optimizer=optimizer, **options)
            else:
                from ..verify.script import verify_script

                report = _told(verify_script, config, script, args=args or (), **options)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    elif config is None:
        print(report)
    else:
        first, *rest = str(report).splitlines()
        say(first, "green" if report.equal else "red")
        for line in rest:
            say(line)
    raise typer.Exit(0 if report.equal else 1)


def _told(run: Callable[..., VerifyReport], config: Path, trained: Any, **options: Any) -> VerifyReport:
    """The report of `run`; an error that says what to change becomes a refusal."""
    from ..verify import VerifyReport

    try:
        return run(config, trained, **options)
    except ConfigError as error:
        problems = error.problems
    except HalfmeshError as error:
        problems = (str(error),)
    return VerifyReport(False, None, (), str(config), options["world_size"], None, problems)


@contextlib.contextmanager
def _cleaned_up() -> Iterator[None]:
    """A scope in which Ctrl-C and SIGTERM clean up its processes and files, and then end the command."""

    def stop(number: int, _: object) -> None:
        for again in before:
            signal.signal(again, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress(hidden: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows each step: on a terminal next to a bar, else in lines."""
    console = Console(stderr=True)
    if hidden or not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda text: bar.update(task, description=text)
