"""`halfmesh convert-config`: another engine's config as one of halfmesh."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

NAMES = ("colossal", "apex", "sagemaker", "deepspeed", "accelerate")


def convert_config(
    source: Annotated[
        str, typer.Argument(help="A .py, .json or .yaml file; or a dict, or key=value pairs, in quotes.")
    ],
    origin: Annotated[str, typer.Option("--from", help=f"Whose config it is: {', '.join(NAMES)}.")],
    out: Annotated[Path | None, typer.Option(help="Write the config there, a .py file; left out: print it.")] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="The number of ranks, where the source does not say it.")
    ] = None,
    device: Annotated[str, typer.Option(help="The kind of device that it is checked for: cuda or cpu.")] = "cuda",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn another engine's config into one of halfmesh.

    Files are read, not run: colossal: Colossal-AI's legacy config.py; apex: a script that calls amp.initialize, or its
    arguments; sagemaker: parameters of its model parallel library, or a script with distribution={...}; deepspeed:
    ds_config.json; accelerate: default_config.yaml, or a script that calls Accelerator.

    Each key of the source is in one of three lists on stderr: converted, without equivalent, not understood. The exit
    status is 0 if all was understood, no precision and no sharding is lost, and the config can run (on --world-size
    ranks, if given); else 1.
    """
    from ..errors import InputError, did_you_mean
    from ..migration import writing
    from ..migration.convert import convert
    from ..migration.origins import ORIGINS
    from ..migration.reading import read
    from ..plan.writing import put, refuse_path

    if origin not in ORIGINS:
        raise typer.BadParameter(f"--from {origin}: allowed: {', '.join(ORIGINS)}{did_you_mean(origin, ORIGINS)}")
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"--device {device}: allowed: cuda, cpu")
    if out is None and force:
        raise typer.BadParameter("--force says something about --out, which is missing")
    try:
        if out is not None:
            refuse_path(out, force)
        with contextlib.redirect_stdout(sys.stderr):
            conversion = convert(ORIGINS[origin], read(source, origin), world_size, device)
        title = Path(source).name if len(source) < 256 and Path(source).is_file() else "what was given"
        text = writing.as_python(conversion, title, ORIGINS[origin].title)
        writing.verify(text, conversion)
        if out is not None:
            put(out, text)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    answer = writing.as_json(conversion, text)
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        for line in writing.summary(conversion):
            print(line, file=sys.stderr)
        print(f"written: {out}" if out is not None else text, end="\n" if out is not None else "")
    raise typer.Exit(0 if answer["ok"] else 1)
