"""`halfmesh plan`: the simplest change of a config by which a model fits."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError, InputError
from .check import AsJson, Force, Overrides, say


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="package.module:build, which builds the model and its inputs.")],
    world_size: Annotated[int, typer.Option(help="The number of ranks.")],
    gpu_memory: Annotated[str, typer.Option(help="Memory of one device, such as 80GB or 80GiB.")],
    config: Annotated[Path | None, typer.Argument(help="The config to begin with; left out, an empty one.")] = None,
    overrides: Overrides = None,
    batch: Annotated[
        list[str] | None,
        typer.Option(help="An input of one data rank, such as 8,2048:int64; repeatable."),
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="Devices of a node; tensor parallelism stays within one.")] = 8,
    device: Annotated[str, typer.Option(help="The kind of device: cuda or cpu.")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="Write the chosen config to this .py file.")] = None,
    force: Force = False,
    picture: Annotated[Path | None, typer.Option(help="Draw what each rank holds, as an .svg file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the simplest change by which a model fits.

    Tries changes of the config from the simplest to the most invasive, each in a dry run: one rank of each kind does an
    update on tensors without memory. Reports the costs of the chosen change. Needs no GPU. The exit status is 0 if
    something fits, else 1.

    build() returns (model, inputs); or (model, (inputs, targets), criterion); or, with --batch, the model.
    """
    from ..config.load import load_config
    from ..dry_run import rungs, show
    from ..dry_run.dry_run import workers
    from ..dry_run.ladder import search_layouts
    from ..dry_run.rungs import PlanRequest
    from ..engine.summary import parse_bytes

    try:
        if out is not None:
            rungs.refuse_target("--out", out, force)
        if picture is not None:
            rungs.refuse_target("--picture", picture, force)
        with contextlib.redirect_stdout(sys.stderr):  # the output of the config or the model is not part of the answer
            loaded = load_config({} if config is None else config, overrides or ())
            limit = parse_bytes(gpu_memory)
            asked = PlanRequest(loaded, world_size, limit, model, tuple(batch or ()), gpus_per_node, device)
            with workers(is_fresh=bool(context.obj)) as over:
                ladder = search_layouts(asked, over, lambda text: print(text, file=sys.stderr, flush=True))
        chosen = ladder.chosen
        if chosen is not None and ladder.update is not None and out is not None:
            rungs.write(out, rungs.config_text(chosen, asked, ladder.update), chosen.config)
    except (ConfigError, InputError) as error:
        raise typer.BadParameter(str(error)) from None
    if chosen is not None and chosen.run is not None and picture is not None:
        show.draw(picture, chosen.config, chosen.run, model, asked.batch, gpus_per_node)
    if as_json:
        print(json.dumps(show.ladder_as_json(ladder, asked), indent=2))
    else:
        for line in show.ladder_lines(ladder, asked):
            say(line)
        if chosen is not None and out is not None:
            say(f"written: {out}")
    raise typer.Exit(0 if chosen is not None else 1)
