"""`halfmesh configs`: the configs that come with halfmesh."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Annotated

import typer

_PACKAGE = Path(__file__).resolve().parents[1]
_OTHER = re.compile(r"^from (\w+) import \*$")


def configs(
    name: Annotated[str | None, typer.Argument(help="One of them: print it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write it there, a .py file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the configs that come with halfmesh, or print one.

    One that is printed has what it imports of others in its place.
    """
    from ..errors import InputError, did_you_mean
    from ..plan.writing import put, refuse_path

    found = find_configs()
    if name is None:
        if out is not None or force:
            raise typer.BadParameter("--out and --force say something about a config: name one")
        lines = {stem: describe(path) for stem, path in found.items()}
        if as_json:
            print(json.dumps({"configs": [{"name": stem, "about": line} for stem, line in lines.items()]}, indent=2))
        else:
            width = max(map(len, lines))
            for stem, line in lines.items():
                print(f"{stem:{width}}  {line}")
        return
    stem = name.removesuffix(".py")
    if stem not in found:
        near = did_you_mean(stem, found)
        raise typer.BadParameter(f"{name}: there is no such config{near}; halfmesh configs lists them")
    if force and out is None:
        raise typer.BadParameter("--force says something about --out, which is missing")
    text = read_whole(found[stem])
    if out is not None:
        try:
            refuse_path(out, force)
            put(out, text)
        except InputError as error:
            raise typer.BadParameter(str(error)) from None
    if as_json:
        print(json.dumps({"name": stem, "about": describe(found[stem]), "config": text}, indent=2))
    else:
        print(text if out is None else f"written: {out}\n", end="")


def find_configs() -> dict[str, Path]:
    """By name: those in the installed package, or in the repository beside it."""
    folder = next(one for one in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if (one / "fp32.py").is_file())
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def describe(path: Path) -> str:
    """The first line of its docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def read_whole(path: Path) -> str:
    """The config with those that it imports everything of in their place, so that it can be copied alone."""
    seen: set[str] = set()
    docstring, lines = _read(path, seen)
    imports = sorted({line for line in lines if line.startswith(("import ", "from "))})
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(line for line in lines if line not in imports)).strip("\n")
    head = [docstring, *(["\n".join(imports)] if imports else [])]
    return "\n\n".join([*head, body]) + "\n"


def _read(path: Path, seen: set[str]) -> tuple[str, list[str]]:
    """Its docstring, and the lines of it and of what it imports, each file once."""
    seen.add(path.stem)
    text = path.read_text(encoding="utf-8")
    first = ast.parse(text).body[0]
    source = text.splitlines()
    docstring, rest = "\n".join(source[: first.end_lineno]), source[first.end_lineno :]
    lines: list[str] = []
    for line in rest:
        other = _OTHER.match(line)
        if other is None:
            lines.append(line)
        elif other[1] not in seen:
            lines += ["", *_read(path.with_name(f"{other[1]}.py"), seen)[1]]
    return docstring, lines
