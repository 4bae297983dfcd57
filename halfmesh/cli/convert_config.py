"""`halfmesh convert-config`: another engine's config as one of halfmesh."""

from __future__ import annotations

import ast
import contextlib
import enum
import json
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, InputError, counted, did_you_mean, show
from .check import Device, load, usage_errors

if TYPE_CHECKING:
    from ..config import Config
    from ..migration.table import Outcome

NAMES = ("colossal", "apex", "sagemaker", "deepspeed", "accelerate")
_EACH_BATCH = (
    "gradient_accumulation counts batches itself: delete the `if (i + 1) % N == 0` around the step and the `/ N` of "
    "the loss, and call engine.step() for each batch"
)


def convert_config(
    source: Annotated[str, typer.Argument(help="A .json, .yaml or .py file; a dict, or key=value pairs, in quotes.")],
    origin: Annotated[str, typer.Option("--from", help=f"The library: {', '.join(NAMES)}.")],
    world_size: Annotated[int | None, typer.Option(min=1, help="Number of ranks to check the new config for.")] = None,
    device: Device = "cuda",
) -> None:
    """Convert another library's config.

    Prints the new config. Sources: colossal (Colossal-AI's legacy config.py, which is executed), apex (arguments of
    amp.initialize), sagemaker (parameters of its model parallel library), deepspeed (ds_config.json), accelerate
    (default_config.yaml, or the arguments of Accelerator).

    Each key of the source is listed on stderr: converted, without equivalent, or not understood. The exit status is 0
    if all keys were understood, no precision and no sharding is lost, and the config can run (on --world-size ranks,
    if given); else 1.
    """
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
        *([_EACH_BATCH] if settings.get("gradient_accumulation", 1) != 1 else []),
        *(f"{key} = {value!r} is the default of {table.title}" for key, value in unsaid.items()),
    ]
    where = "" if world_size is None else f" on {counted(world_size, 'rank')}"
    lines = [f"cannot run{where}: {finding}" for finding in findings] + list(_describe(values, outcomes, looks))
    print("\n".join(lines), file=sys.stderr)
    title = Path(source).name if len(source) < 256 and Path(source).is_file() else "its arguments"
    for line in (f"Made by halfmesh convert-config from {title} ({table.title}).", *lines):
        print("\n".join(f"# {part}" for part in textwrap.wrap(line, 100, subsequent_indent="  ")))
    print()
    for key, value in settings.items():
        print(f"{key} = {as_python(value)}")
    right = not findings and all(outcome.kind in ("converted", "without") for outcome in outcomes.values())
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


def _describe(values: Mapping[str, Any], outcomes: Mapping[str, Outcome], looks: list[str]) -> Iterator[str]:
    """The lost keys, the points to check, and the three lists."""

    rows: dict[str, list[str]] = {"lost": [], "converted": [], "without": [], "not understood": []}
    for key, outcome in outcomes.items():
        ours = ", ".join(f"{name} = {show(value, 80)}" for name, value in outcome.settings.items())
        said = f"{ours} (look: {outcome.note})" if ours and outcome.note else ours or outcome.note
        sign = " ->" if outcome.kind == "converted" else ":"
        rows[outcome.kind].append(f"{key} = {show(values[key], 80)}{sign} {said}")
    yield from (f"lost: {row}" for row in rows.pop("lost"))
    yield from (f"look: {look}" for look in looks)
    for kind, listed in rows.items():
        if listed:
            yield f"{kind.replace('without', 'without equivalent')}: {len(listed)}"
        yield from (f"  {row}" for row in listed)


def _find_problems(config: Config, world_size: int | None, device: str) -> list[str]:
    """The reasons why a config cannot run; without a world size, on as many ranks as its layout needs."""
    from ..compat import check
    from ..parallel.registries import DATA_STRATEGIES

    parallel, data = config.parallel, config.parallel.data
    data_ranks = data.size or DATA_STRATEGIES.get(data.strategy).ranks_of_copy(data, 2)
    least = math.prod(parallel.sizes.values()) * data_ranks
    return [str(finding) for finding in check(config, world_size or least, device)]
