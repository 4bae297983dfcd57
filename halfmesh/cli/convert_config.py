"""`halfmesh convert-config`: another library's config as one of halfmesh."""

from __future__ import annotations

import ast
import contextlib
import enum
import json
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, InputError, counted, did_you_mean, show
from .check import AsJson, Device, load, usage_errors

if TYPE_CHECKING:
    from ..migration.table import Outcome

NAMES = ("colossal", "apex", "sagemaker", "deepspeed", "accelerate")
_EACH_BATCH = "call engine.step() after every batch; delete the `if (i + 1) % N == 0` around it and the loss's `/ N`"


def convert_config(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A .json, .yaml or .py file; a dict, or key=value pairs, in quotes."),
    ],
    origin: Annotated[
        str,
        typer.Option("--from", metavar="LIBRARY", help=f"One of {', '.join(NAMES)}.", autocompletion=lambda: [*NAMES]),
    ],
    world_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of ranks to check the new config for.")
    ] = None,
    device: Device = "cuda",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List every key of the source.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert another library's config.

    Prints the new config. Comments at its top list what needs action: keys that were lost or not understood, what you
    must do by hand, and what to check. Give --verbose to list all keys.

    Sources: colossal (Colossal-AI's legacy config.py, which is executed), apex (arguments of amp.initialize), sagemaker
    (parameters of its model parallel library), deepspeed (ds_config.json), accelerate (default_config.yaml, or the
    arguments of Accelerator).

    The exit status is 0 if all keys were understood, no precision and no sharding was lost, and the config can run (on
    the number of ranks that you give); else 1.
    """
    from ..compat import check
    from ..config.text import as_json as plain
    from ..config.text import as_python
    from ..migration.table import convert
    from ..migration.tables import ORIGINS
    from ..parallel.registries import DATA_STRATEGIES

    if origin not in ORIGINS:
        raise typer.BadParameter(f"--from {origin}: allowed: {', '.join(ORIGINS)}{did_you_mean(origin, ORIGINS)}")
    with usage_errors():
        values = dict(flatten(read(source, origin)))
    table = ORIGINS[origin]
    outcomes, settings = convert(table, values)
    config, findings = load(settings)
    for key in [key for key, value in settings.items() if _literal(repr(value)) != value]:
        del settings[key]
        findings.append(f"{key}: not a literal; copy it by hand")
    if config is not None:
        parallel, data = config.parallel, config.parallel.data
        data_ranks = data.size or DATA_STRATEGIES.get(data.strategy).ranks_of_copy(data, 2)
        least = math.prod(parallel.sizes.values()) * data_ranks  # ranks that the layout needs
        findings += map(str, check(config, world_size or least, device))
    looks = [table.look] if table.look else []
    if settings.get("gradient_accumulation", 1) != 1:
        looks.append(_EACH_BATCH)
    unsaid = table.always({key.removeprefix(table.prefix): value for key, value in values.items()})
    looks += [f"{key} = {value!r} is the default of {table.title}" for key, value in unsaid.items()]
    right = not findings and not any(outcome.kind in ("lost", "not understood") for outcome in outcomes.values())
    if as_json:
        keys = [{"key": key, "value": values[key]} | asdict(outcome) for key, outcome in outcomes.items()]
        answer = {"ok": right, "library": table.title, "config": settings, "problems": findings, "check": looks}
        print(json.dumps(plain(answer | {"keys": keys}), indent=2))
        raise typer.Exit(0 if right else 1)
    where = "" if world_size is None else f" on {counted(world_size, 'rank')}"
    lines = [f"Made by halfmesh convert-config from {table.title}."]
    lines += [f"cannot run{where}: {finding}" for finding in findings]
    lines += [*(f"check: {look}" for look in looks), *_lines(values, outcomes, verbose)]
    for line in lines:
        print("\n".join(f"# {part}" for part in textwrap.wrap(line, 100, subsequent_indent="  ")))
    print("", *(f"{key} = {as_python(value)}" for key, value in settings.items()), sep="\n")
    numbers = Counter(outcome.kind for outcome in outcomes.values())
    said = ", ".join(f"{number} {kind}" for kind, number in numbers.items()) or "none"
    print(f"{counted(len(outcomes), 'key')}: {said} (--verbose lists all keys)", file=sys.stderr)
    raise typer.Exit(0 if right else 1)


def read(given: str, origin: str) -> Mapping[Any, Any]:
    """The keys and values of a file, of a dict (JSON or Python), or of key=value pairs.

    Raises:
        InputError, ConfigError: `given` is none of these.
    """
    from ..config.load import read_raw

    if given.lstrip().startswith("{"):
        value = _literal(given.strip())
        if not isinstance(value, dict):
            raise InputError(f"{given[:120]!r}: neither JSON nor a Python dict of literals")
        return value
    path = Path(given)
    if "=" in given and not path.is_file():
        pairs = [pair.partition("=") for pair in given.replace(",", " ").split()]
        return {key: _literal(value) for key, _, value in pairs}
    if path.suffix == ".py" and origin != "colossal":
        raise InputError(f"{path}: scripts are not executed; give the arguments as a dict or key=value pairs")
    try:
        return read_raw(path)
    except ConfigError as error:
        if "'colossalai" not in str(error):
            raise
        raise InputError(f"{error}\nRemove its imports: for AMP_TYPE write 'from halfmesh import AMP_TYPE'") from None


def flatten(section: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key. A user's UPPERCASE constant stays one value."""
    for key, value in section.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not name.isupper():
            yield from flatten(value, f"{name}.")
        elif isinstance(value, str) and value.lower() in ("true", "false"):
            yield name, value.lower() == "true"
        else:
            yield name, value.value if isinstance(value, enum.Enum) else value


def _literal(text: str) -> Any:
    """The value of a JSON or Python literal; any other text stays a string."""
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError):
            return parse(text)
    return text


def _lines(values: Mapping[str, Any], outcomes: Mapping[str, Outcome], verbose: bool) -> Iterator[str]:
    """What needs action, by kind; if `verbose`, all keys."""
    for kind in ("lost", "not understood", "by hand", "converted", "without"):
        needs_action = kind not in ("converted", "without")
        for key, outcome in outcomes.items():
            if outcome.kind == kind and (needs_action or verbose or (outcome.settings and outcome.note)):
                ours = ", ".join(f"{name} = {show(value, 80)}" for name, value in outcome.settings.items())
                said = f"{ours} (check: {outcome.note})" if ours and outcome.note else ours or outcome.note
                yield f"{kind}: {key} = {show(values[key], 80)} -> {said}"
