"""`halfmesh run` and `halfmesh verify`: they start ranks, to train, or to prove that a layout equals one process."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import HalfmeshError, bullet_list, counted, did_you_mean
from .check import DEVICES, MODEL, AsJson, Overrides, load, say, usage_errors


def run(
    context: typer.Context,
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="The training script. Everything after it is passed on.")
    ],
    nproc: Annotated[int, typer.Option(metavar="N", min=1, help="Processes on this node.")] = 1,
    nnodes: Annotated[int, typer.Option(metavar="N", min=1, help="Nodes, each with the same number of processes.")] = 1,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="One of the nodes, the same on all. Required if there are several."),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(metavar="N", min=0, help="How often to restart all ranks after a failure.")
    ] = 0,
    device: Annotated[
        str | None, typer.Option(help="Kind of device to check for. The default is cuda if there is a GPU.", **DEVICES)
    ] = None,
) -> None:
    """Check a config, then start a script as torchrun does.

    Reads the --config and --set that follow the script. If the config cannot run on this number of ranks, prints the
    reasons, starts nothing and exits with status 1. If the script then trains with another config, rank 0 warns.
    """
    if str(script).startswith("-"):
        raise typer.BadParameter(_explain_option(str(script).partition("=")[0], context))
    if not script.is_file():
        raise typer.BadParameter(f"cannot read {script}: there is no such file")
    if nnodes > 1 and rdzv_endpoint is None:
        raise typer.BadParameter("--nnodes needs --rdzv-endpoint host:port, the same on all nodes")
    config, overrides = read_options(context.args)
    checked = ""
    if config is None and overrides:
        raise typer.BadParameter(f"--set {overrides[0]} changes the config that --config names: give --config as well")
    if config is None:
        print(f"halfmesh run: no --config after {script}: nothing to check before the start", file=sys.stderr)
    else:
        checked, problems = check_config(Path(config), nproc * nnodes, device, overrides)
        if problems:
            title = f"{config}: cannot run on {counted(nproc * nnodes, 'rank')}"
            print(bullet_list(title, problems), file=sys.stderr)
            raise typer.Exit(1)
    meeting = ["--standalone"] if nnodes == 1 else ["--rdzv-backend=c10d", f"--rdzv-endpoint={rdzv_endpoint}"]
    shape = [f"--nnodes={nnodes}", f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
    # "--": without it torchrun rejects a script's argument that begins like one of torchrun's ("--nproc").
    with _told(checked):
        raise typer.Exit(torchrun([*meeting, *shape, "--", str(script), *context.args]))


def _explain_option(name: str, context: typer.Context) -> str:
    """Why `name` cannot stand before the script."""
    if name in ("--config", "--set"):
        return f"{name} belongs after the script: halfmesh run --nproc N train.py {name} ..."
    known = [option for one in context.command.params for option in one.opts if option.startswith("--")]
    return f"{name}: halfmesh run has no such option{did_you_mean(name, known)}; options of the script follow it"


@contextlib.contextmanager
def _told(checked: str) -> Iterator[None]:
    """A scope whose processes know which config was checked, "" for none."""
    from ..config.load import CHECKED

    os.environ[CHECKED] = checked
    try:
        yield
    finally:
        os.environ.pop(CHECKED, None)


def torchrun(arguments: list[str]) -> int:
    """Do what torchrun does with `arguments`. Returns the exit status: 128 plus the signal's number, if one ended it.

    Its errors become one line: a traceback of torchrun's code would only bury them.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(arguments)
    except SignalException as ended:
        return 128 + int(ended.sigval)
    except ChildFailedError as failed:  # whose traceback the rank itself has written
        rank, first = failed.get_first_failure()
        how = f"was ended by {first.signal_name()}" if first.exitcode < 0 else f"failed with status {first.exitcode}"
        print(f"halfmesh run: rank {rank} {how}, the first of {counted(len(failed.failures), 'rank')}", file=sys.stderr)
        return 1
    return 0


def read_options(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The `--config` and the `--set`s among the arguments of a script."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--set", action="append", default=[])
    found, _ = parser.parse_known_args(arguments)
    return found.config, found.set


def check_config(
    path: Path, world_size: int, device: str | None, overrides: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """The text by which ranks know the config, and all its problems on `world_size` ranks."""
    import torch

    from ..compat import check
    from ..config.load import tell_checked

    with usage_errors():
        loaded, problems = load(path, overrides)
    if loaded is None:
        return "", problems
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = " ".join([str(path), *(f"--set {one}" for one in overrides)])
    return tell_checked(loaded, name), list(map(str, check(loaded, world_size, kind)))


def verify(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="The config of the layout. Without it, verifies this machine."),
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help=f"{MODEL}.")] = None,
    script: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run this training script unchanged, in place of a model.")
    ] = None,
    world_size: Annotated[int | None, typer.Option(metavar="N", help="Number of ranks of the layout.")] = None,
    updates: Annotated[int, typer.Option(metavar="N", min=1, help="How many updates to compare.")] = 2,
    overrides: Overrides = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="FUNCTION", help="package.module:function, called with the parameters. Default: SGD with momentum."
        ),
    ] = None,
    accumulated: Annotated[
        bool, typer.Option("--accumulated", help="Compare with one process that accumulates the ranks' batches.")
    ] = False,
    shrink: Annotated[
        bool | None, typer.Option(help="Run at most 2 ranks on each axis. The default on the CPU.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Default: cpu; without a config, cuda if there is a GPU.", **DEVICES)
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="Time that each run may take.")] = 600,
    quick: Annotated[bool, typer.Option("--quick", help="Verify fewer layouts of this machine.")] = False,
    as_json: AsJson = False,
) -> None:
    """Prove that a layout computes the same as one process.

    Trains the model for a few updates in one process, and in the layout on ranks of this machine. Compares what each
    module and each update computes, and names the first difference. The exit status is 0 if everything is equal; 1 if
    something differs or is rejected.

    build() returns (model, inputs); or (model, (inputs, targets), criterion). The second element may be a list of
    batches. Give --script to run a training script in place of the model. Without a config, trains small models in the
    modes and layouts that this machine can run.
    """
    given = (model, script, world_size, overrides, optimizer, accumulated)
    mistakes = {
        "without a config, halfmesh verifies this machine: give only --device, --quick or --json": config is None
        and (any(given) or shrink is not None),
        "give either --model or --script: what to train": config is not None and (model is None) == (script is None),
        "give --world-size: the number of ranks of the layout": config is not None and world_size is None,
        "--quick works only without a config": config is not None and quick,
        f"{' '.join(args or ())}: only a --script takes arguments": script is None and args,
        "--optimizer works only with --model; a script builds its own": script is not None and optimizer,
        f"--device {device}: use cpu or cuda": device not in (None, "cpu", "cuda"),
    }
    for why, is_there in mistakes.items():
        if is_there:
            raise typer.BadParameter(why)
    options: dict[str, Any] = {"updates": updates, "overrides": overrides or (), "shrink": shrink, "timeout": timeout}
    report: Any
    with _cleaned_up(), contextlib.redirect_stdout(sys.stderr):  # what configs and models print is not the answer
        if config is None or world_size is None:
            from ..verify.machine import verify_machine

            report = verify_machine(device, quick)
        else:
            from ..config.text import UnreadableError
            from ..verify import VerifyReport, phases

            options |= {"device": device or "cpu", "world_size": world_size, "accumulated": accumulated}
            options["progress"] = lambda text: print(text, file=sys.stderr, flush=True)
            try:
                if script is not None:
                    report = phases.verify_script(config, script, args or (), **options)
                else:
                    report = phases.verify(config, model or "", optimizer=optimizer, **options)
            except UnreadableError as error:
                raise typer.BadParameter(str(error)) from None
            except HalfmeshError as error:  # it says what to change
                problems = getattr(error, "problems", (str(error),))
                report = VerifyReport(False, None, (), str(config), world_size, None, tuple(problems))
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
