"""The command line: `halfmesh check`, `halfmesh plan`. torch is imported only by the commands that need it."""

from __future__ import annotations

import typer

from .check import check
from .plan import plan

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _commands() -> None:
    """halfmesh: any precision mode with any parallel layout, from one config."""


app.command(epilog="Example: halfmesh check config.py --world-size 8 --device cuda")(check)
app.command(
    epilog="Example: halfmesh plan --model my_package.my_model:build --world-size 64 --gpu-memory 80GB --out config.py"
)(plan)


def main() -> None:
    """The console script `halfmesh`."""
    app(obj="a fresh process")
