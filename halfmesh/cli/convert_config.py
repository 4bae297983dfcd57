"""`halfmesh convert-config`: another library's config as one of halfmesh."""

from __future__ import annotations

import ast
import contextlib
import enum
import json
import math
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, InputError, counted, did_you_mean, show
from .check import AsJson, Device, load, usage_errors

if TYPE_CHECKING:
    from ..config import Config
    from ..migration.table import Outcome

NAMES = ("colossal", "apex", "sagemaker", "deepspeed", "accelerate")
_EACH_BATCH = (
    "gradient_accumulation counts batches itself: delete the `if (i + 1) % N == 0` around the step and the `/ N` of "
    "the loss, and call engine.step() after every batch"
)
_TITLES = {"lost": "lost", "not understood": "not understood", "by hand": "do by hand"}
"""Kinds of outcomes that need action, and how their lines begin."""


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
    from ..config.text import as_json as plain
    from ..config.text import as_python
    from ..migration.table import convert
    from ..migration.tables import ORIGINS

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
        findings += _find_problems(config, world_size, device)
    unsaid = table.always({key.removeprefix(table.prefix): value for key, value in values.items()})
    looks = [
        *([table.look] if table.look else []),
        *(f"set {key}, if your script calls {call}" for key, call in table.calls.items() if key not in settings),
        *([_EACH_BATCH] if settings.get("gradient_accumulation", 1) != 1 else []),
        *(f"{key} = {value!r} is the default of {table.title}" for key, value in unsaid.items()),
    ]
    right = not findings and not any(outcome.kind in ("lost", "not understood") for outcome in outcomes.values())
    if as_json:
        keys = [{"key": key, "value": values[key]} | asdict(outcome) for key, outcome in outcomes.items()]
        answer = {"ok": right, "library": table.title, "config": settings, "problems": findings, "check": looks}
        print(json.dumps(plain(answer | {"keys": keys}), indent=2))
        raise typer.Exit(0 if right else 1)
    where = "" if world_size is None else f" on {counted(world_size, 'rank')}"
    lines = [f"cannot run{where}: {finding}" for finding in findings]
    lines += _describe(values, outcomes, looks, verbose)
    title = Path(source).name if os.path.isfile(source) else "its arguments"
    for line in (f"Made by halfmesh convert-config from {title} ({table.title}).", *lines):
        print("\n".join(f"# {part}" for part in textwrap.wrap(line, 100, subsequent_indent="  ")))
    print()
    for key, value in settings.items():
        print(f"{key} = {as_python(value)}")
    print(f"{_count(outcomes)}; {_hint(where, findings, lines, verbose)}", file=sys.stderr)
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
    if "=" in given and not os.path.isfile(given):  # pathlib raises for a long text
        pairs = [pair.partition("=") for pair in given.replace(",", " ").split()]
        if wrong := [key for key, sign, _ in pairs if not key or not sign]:
            raise InputError(f"{wrong[0]!r}: expected key=value pairs, such as opt_level=O2")
        return {key: _literal(value) for key, _, value in pairs}
    if path.suffix == ".py" and origin != "colossal":
        raise InputError(
            f"{path}: scripts are not executed; give the arguments as a dict or key=value pairs, in quotes"
        )
    try:
        found = read_raw(path)[0]
        whole = found.get("CONFIG")  # Colossal-AI's launch takes this dict, too
        if origin == "colossal" and isinstance(whole, Mapping):
            return {**{key: value for key, value in found.items() if key != "CONFIG"}, **whole}
        return found
    except ConfigError as error:
        if "'colossalai" not in str(error):
            raise
        hint = "remove its imports: for AMP_TYPE write 'from halfmesh import AMP_TYPE'"
        raise InputError(f"{error}\nColossal-AI need not be installed; {hint}") from None


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


def _describe(
    values: Mapping[str, Any], outcomes: Mapping[str, Outcome], looks: Sequence[str], verbose: bool
) -> Iterator[str]:
    """The keys that need action, by kind; then, if `verbose`, the other keys."""

    def line(key: str) -> str:
        outcome = outcomes[key]
        ours = ", ".join(f"{name} = {show(value, 80)}" for name, value in outcome.settings.items())
        said = f"{ours} (check: {outcome.note})" if ours and outcome.note else ours or outcome.note
        sign = " ->" if outcome.kind == "converted" else ":"
        return f"{key} = {show(values[key], 80)}{sign} {said}"

    for kind, title in _TITLES.items():
        yield from (f"{title}: {line(key)}" for key, outcome in outcomes.items() if outcome.kind == kind)
    yield from (f"check: {look}" for look in looks)
    for outcome in outcomes.values():
        if outcome.kind == "converted" and outcome.settings and outcome.note and not verbose:
            yield f"check: {', '.join(outcome.settings)}: {outcome.note}"
    for kind, title in {"converted": "converted", "without": "without equivalent"}.items() if verbose else ():
        if listed := [key for key, outcome in outcomes.items() if outcome.kind == kind]:
            yield f"{title}: {len(listed)}"
            yield from (f"  {line(key)}" for key in listed)


def _count(outcomes: Mapping[str, Outcome]) -> str:
    """How many keys have each outcome."""
    numbers = Counter(outcome.kind for outcome in outcomes.values())
    titles = {"converted": "converted", **_TITLES, "without": "without equivalent"}
    parts = [f"{numbers[kind]} {title.replace('do by', 'to do by')}" for kind, title in titles.items() if numbers[kind]]
    return f"{counted(len(outcomes), 'key')}: {', '.join(parts) or 'none'}"


def _hint(where: str, findings: Sequence[str], lines: Sequence[str], verbose: bool) -> str:
    """The end of the summary: where to read more."""
    runs = f"the config cannot run{where}; " if findings else ""
    todo = "the comments above the config say what to do" if lines else "nothing to do"
    return f"{runs}{todo}" + ("" if verbose else " (--verbose lists all keys)")


def _find_problems(config: Config, world_size: int | None, device: str) -> list[str]:
    """The reasons why a config cannot run; without a world size, on as many ranks as its layout needs."""
    from ..compat import check
    from ..parallel.registries import DATA_STRATEGIES

    parallel, data = config.parallel, config.parallel.data
    data_ranks = data.size or DATA_STRATEGIES.get(data.strategy).ranks_of_copy(data, 2)
    least = math.prod(parallel.sizes.values()) * data_ranks
    return [str(finding) for finding in check(config, world_size or least, device)]
