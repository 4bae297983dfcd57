"""Pages of the documentation: their snippets, what they show of a terminal, and their tables."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from halfmesh.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def page_path(page: str) -> Path:
    """`page` is a path within docs/ ("migration/apex.md"), or that of a page beside it ("README.md")."""
    return DOCS / page if (DOCS / page).exists() else ROOT / page


def read_page(page: str) -> str:
    return page_path(page).read_text()


def find_blocks(text: str, language: str) -> list[str]:
    """With the language "" those that show what is printed."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [block for found, block in fences if found == language]


def snippet(page: str, name: str) -> str:
    """The one block of Python on `page` that begins with `# name`.

    `test_site.py` looks for these calls: every snippet of a page has to be asked for, both names written out.
    """
    found = [block for block in find_blocks(read_page(page), "python") if re.match(rf"# {re.escape(name)}\b", block)]
    assert len(found) == 1, f"{page}: {len(found)} blocks begin with # {name}"
    return found[0]


def shown_commands(page: str) -> list[tuple[str, str]]:
    """What `page` shows of a terminal: "$ command", and what it prints."""
    return [(block.partition("\n")[0], block.partition("\n")[2]) for block in find_blocks(read_page(page), "console")]


def check(command: str) -> str:
    """What `$ halfmesh ...` prints."""
    _, *args = shlex.split(command.removeprefix("$ "))
    return CliRunner().invoke(app, args).stdout


def find_rows(text: str, header: str) -> list[list[str]]:
    """The cells of the Markdown table whose header begins with `header`."""
    table = text[text.index(f"| {header} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table]


def defaults(page: str, header: str) -> dict[str, Any]:
    """A table of keys: key -> default. One that is no literal (*required*, "the mode's") stays a text."""
    found = {}
    for key, default, *_ in find_rows(read_page(page), header):
        literal = re.fullmatch(r"`(.*)`", default)
        found[key.strip("`")] = eval(literal[1], {"torch": torch}) if literal else default
    return found


def stand_ins() -> dict[str, Any]:
    """What the snippets expect a user to have: 2-layer model, optimizer, criterion and 60 samples."""
    torch.manual_seed(0)
    x = torch.randn(60, 6)
    samples = TensorDataset(x, (x[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 2))
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.02),
        "criterion": nn.CrossEntropyLoss(),
        "dataloader": DataLoader(samples, batch_size=4),
        "eval_dataloader": DataLoader(samples, batch_size=7),
    }


def import_snippet(page: str, name: str, folder: Path) -> Any:
    """The snippet as a module in `folder`, imported from there as a user would; take it out of `sys.modules` later."""
    (folder / name).write_text(snippet(page, name))
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name.removesuffix(".py"))
