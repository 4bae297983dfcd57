"""`halfmesh report`: an HTML page about runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of the hook 'run', or RunFolder.")],
    out: Annotated[Path, typer.Option(help="The page; an older report is replaced.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is not a report.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the data as one JSON object, and write no page.")
    ] = False,
) -> None:
    """Write an HTML page about one or several runs.

    Several runs are shown side by side. The page needs no network and no other file. The exit status is 1 if a folder
    holds no run.
    """
    from ..errors import InputError
    from ..report.page import as_data, write_report
    from ..report.run import read_runs

    try:
        if as_json:
            print(json.dumps(as_data(read_runs(runs))))
            return
        page = write_report(*runs, out=out, replace=force)
    except InputError as error:
        print(f"halfmesh report: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"{page} ({page.stat().st_size / 1024:.0f} KiB)")
