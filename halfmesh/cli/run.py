"""`halfmesh run`: torchrun, with the config checked first."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..errors import bullet_list, counted
from .check import load


def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The training script; what follows is passed on to it.")],
    nproc: Annotated[int, typer.Option(min=1, help="Processes on this node.")] = 1,
    nnodes: Annotated[int, typer.Option(min=1, help="Number of nodes, each with as many processes.")] = 1,
    rdzv_endpoint: Annotated[str | None, typer.Option(help="With --nnodes: host:port of one, the same on all.")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often to restart all ranks after a failure.")] = 0,
    device: Annotated[str | None, typer.Option(help="Kind of device to check for: cuda or cpu.")] = None,
) -> None:
    """Check a config, then start a script as torchrun does.

    Reads the --config and --set that follow the script. If the config cannot run on that many ranks, the reasons are
    printed, nothing is started, and the exit status is 1.
    """
    if not script.is_file():
        raise typer.BadParameter(f"{script}: there is no such file")
    if nnodes > 1 and rdzv_endpoint is None:
        raise typer.BadParameter("--nnodes needs --rdzv-endpoint host:port, the same on all nodes")
    config, overrides = read_options(context.args)
    if config is None:
        print(f"halfmesh run: no --config after {script}, so no config is checked", file=sys.stderr)
    elif problems := find_problems(Path(config), nproc * nnodes, device, overrides):
        title = f"{config}: cannot run on {counted(nproc * nnodes, 'rank')}"
        print(bullet_list(title, problems), file=sys.stderr)
        raise typer.Exit(1)
    meeting = ["--standalone"] if nnodes == 1 else ["--rdzv-backend=c10d", f"--rdzv-endpoint={rdzv_endpoint}"]
    shape = [f"--nnodes={nnodes}", f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
    # "--": without it torchrun refuses a script's argument that begins like one of torchrun's ("--nproc").
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, *shape, "--", str(script), *context.args]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def read_options(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The `--config` and the `--set`s among the arguments of a script."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--set", action="append", default=[])
    found, _ = parser.parse_known_args(arguments)
    return found.config, found.set


def find_problems(config: Path, world_size: int, device: str | None, overrides: Sequence[str] = ()) -> list[str]:
    """All problems of `config` on `world_size` ranks."""
    import torch

    from ..compat import check

    with contextlib.redirect_stdout(sys.stderr):
        loaded, problems = load(config, overrides)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return problems if loaded is None else list(map(str, check(loaded, world_size, kind)))
