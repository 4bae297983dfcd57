"""`halfmesh plan`: look for the best config of a model on so many devices."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="package.module:build, which builds the model and says its inputs.")],
    world_size: Annotated[int, typer.Option(help="The number of ranks.")],
    gpu_memory: Annotated[str, typer.Option(help="What one device has, such as 80GB or 80GiB.")],
    batch: Annotated[
        list[str] | None,
        typer.Option(help="An input as a data rank's loader gives it, such as 8,2048:int64; repeatable."),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(help="The rows that an update takes over all ranks; left out: the batch's rows on each rank."),
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="Devices of one node, over which tensor groups do not reach.")] = 8,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="A precision to choose from, such as fp32 or torch-fp16; repeatable; left out: all but fp16."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="The kind of device: cuda or cpu.")] = "cuda",
    top: Annotated[int, typer.Option(help="Layouts that are listed.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Write the chosen config there, a .py file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw who holds what: a .png or .svg file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look for the config that suits a model, and say why.

    That is: layout, precision, batches and recomputation. Needs no GPU. The exit status is 0 if something fits,
    else 1. What is chosen was done as a dry run: one rank of each kind does an update on tensors without memory.
    The others are estimates where the list says so.
    build() returns (model, inputs), or (model, (inputs, targets), criterion), or the model, with --batch.
    """
    from ..errors import InputError
    from ..memory import parse_bytes
    from ..plan import picture as pictures
    from ..plan import show_search, writing
    from ..plan.candidates import read_modes
    from ..plan.search import search
    from ..plan.wish import Wish
    from ..plan.workers import Workers, count_cores

    is_fresh = bool(context.obj)
    try:
        modes = read_modes(mode or ())
        limit = parse_bytes(gpu_memory)
        wish = Wish(model, world_size, limit, tuple(batch or ()), gpus_per_node, global_batch, modes, device, top)
        if out is not None:
            writing.refuse_path(out, force)
        if picture is not None:
            pictures.refuse_path(picture, force)
        with (
            contextlib.redirect_stdout(sys.stderr),  # what the model prints is not part of the answer
            Workers(max(2, count_cores()) if is_fresh else 1, is_fresh) as workers,
        ):
            found = search(wish, workers, lambda text: print(text, file=sys.stderr, flush=True))
        if found.chosen is not None and out is not None:
            writing.write(out, found.chosen, wish, found.rows)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    if found.chosen is not None and found.chosen.run is not None and picture is not None:
        pictures.draw(picture, found.chosen.candidate.config, found.chosen.run, model, wish.batch, wish.node)
    if as_json:
        print(json.dumps(show_search.as_json(found, wish), indent=2))
    else:
        console = Console(highlight=False)
        for line in show_search.lines(found, wish):
            console.print(line, markup=False, soft_wrap=True)
        if found.chosen is not None and out is not None:
            console.print(f"written: {out}", markup=False, soft_wrap=True)
    raise typer.Exit(0 if found.chosen is not None else 1)
