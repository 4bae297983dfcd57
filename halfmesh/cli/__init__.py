"""The command line: init.py has `init`, check.py `check` and `plan`, run.py what starts ranks, show.py what only shows.

torch is imported only by the commands that need it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .check import check, plan
from .convert_config import convert_config
from .init import init
from .run import run, verify
from .show import configs, env, report, schema

app = typer.Typer(
    help="halfmesh: training with precision and parallel layout from one config.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # an error of ours belongs in a bug report, as Python prints it
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        print(f"halfmesh {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command(epilog="Example: halfmesh init config.py")(init)
app.command(epilog="Example: halfmesh check config.py --world-size 8 --device cuda")(check)
app.command(
    epilog="Example: halfmesh plan config.py --model my_package.my_model:build --world-size 64 --gpu-memory 80GB"
)(plan)
app.command(epilog="Example: halfmesh verify config.py --model my_package.my_model:build --world-size 8")(verify)
app.command(
    epilog="Example: halfmesh run --nproc 4 train.py --config config.py",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)(run)
app.command(epilog="Example: halfmesh report runs/first runs/second --out report.html")(report)
app.command(
    "convert-config",
    epilog="Example: halfmesh convert-config config.py --from colossal --world-size 8 > halfmesh_config.py",
)(convert_config)
app.command(epilog="Example: halfmesh configs naive_fp16 > config.py")(configs)
app.command(epilog="Example: halfmesh schema > halfmesh.schema.json")(schema)
app.command(epilog="Example: halfmesh env")(env)


def main() -> None:
    """The console script `halfmesh`."""
    app(obj="a fresh process")
