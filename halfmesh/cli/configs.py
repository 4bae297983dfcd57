"""`halfmesh configs`: the configs that come with halfmesh."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Annotated

import typer

_PACKAGE = Path(__file__).resolve().parents[1]


def configs(
    name: Annotated[str | None, typer.Argument(help="One of them: print it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write it there, a .py file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the configs that come with halfmesh, or print one."""
    from ..errors import InputError, did_you_mean
    from ..plan.writing import put, refuse_path

    found = find_configs()
    if name is None:
        if out is not None:
            raise typer.BadParameter("--out says where a config goes: name one")
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
    text = found[stem].read_text(encoding="utf-8")
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
    folder = next(one for one in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if (one / "tensor.py").is_file())
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def describe(path: Path) -> str:
    """The first line of its docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
