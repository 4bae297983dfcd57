"""The command line: init.py has `init`, check.py `check` and `plan`, run.py what starts ranks, show.py what only shows.

torch is imported only by the commands that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

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


class _Command(TyperCommand):
    """A command whose help shows arguments by name, without their Python types."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            records = [one.get_help_record(ctx) for one in self.get_params(ctx) if one.param_type_name == kind]
            if rows := [(name.partition(" <")[0], text) for name, text in filter(None, records)]:
                with formatter.section(title):
                    formatter.write_dl(rows)


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


def _add(function: Callable[..., None], *example: str, **options: Any) -> None:
    """Add a command with the lines of an example, which are not wrapped."""
    lines = ["\b", f"Example: halfmesh {example[0]}", *(f"  {line}" for line in example[1:])]
    app.command(cls=_Command, epilog="\n".join(lines), **options)(function)


_MODEL = "--model my_package.my_model:build"
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
_add(init, "init config.py")
_add(check, "check config.py --world-size 8 --device cuda")
_add(plan, f"plan config.py {_MODEL} \\", "--world-size 64 --gpu-memory 80GB")
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
