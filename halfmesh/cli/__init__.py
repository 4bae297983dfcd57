"""The command line: init.py has `init`, check.py `check` and `plan`, run.py what starts ranks, show.py what only shows.

torch is imported only by the commands that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

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


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False) -> None:
    if version:
        from .. import __version__

        print(f"halfmesh {__version__}")


def _add(function: Callable[..., None], example: str, **options: Any) -> None:
    """Add a command with an example."""
    app.command(epilog=f"Example: halfmesh {example}", **options)(function)


_MODEL = "--model my_package.my_model:build"
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
_add(init, "init config.py")
_add(check, "check config.py --world-size 8 --device cuda")
_add(plan, f"plan config.py {_MODEL} --world-size 64 --gpu-memory 80GB")
_add(verify, f"verify config.py {_MODEL} --world-size 8")
_add(run, "run --nproc 4 train.py --config config.py", context_settings=_PASSED_ON)
_add(report, "report runs/first runs/second --out report.html")
_add(convert_config, "convert-config ds_config.json --from deepspeed > config.py", name="convert-config")
_add(configs, "configs naive_fp16 > config.py")
_add(schema, "schema > halfmesh.schema.json")
_add(env, "env")


def main() -> None:
    """The console script `halfmesh`."""
    app(obj="a fresh process")
