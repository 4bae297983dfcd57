"""`halfmesh configs`: the configs that come with halfmesh."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated

import typer

_PACKAGE = Path(__file__).resolve().parents[1]


def configs(name: Annotated[str | None, typer.Argument(help="The config to print.")] = None) -> None:
    """List the configs that come with halfmesh, or print one."""
    from ..errors import did_you_mean

    # In the installed package, or in the repository.
    folder = next(one for one in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if (one / "tensor.py").is_file())
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    if name is None:
        width = max(map(len, texts))
        for stem, text in texts.items():
            about, *_ = (ast.get_docstring(ast.parse(text)) or "").splitlines() or [""]
            print(f"{stem:{width}}  {about}")
        return
    stem = name.removesuffix(".py")
    if stem not in texts:
        raise typer.BadParameter(f"there is no config {name!r}{did_you_mean(stem, texts)}; halfmesh configs lists them")
    print(texts[stem], end="")
