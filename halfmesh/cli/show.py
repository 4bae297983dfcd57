"""`halfmesh report`, `halfmesh configs`, `halfmesh schema` and `halfmesh env`: they show what is there."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError, did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("pydantic", "safetensors", "tensorboard", "timm", "transformers"),
    *("accelerate", "lightning-fabric", "deepspeed", "apex"),
)
"""Packages besides those in torch's report."""
VARIABLES = (
    *("CUDA_", "GLOO_", "HALFMESH_", "KMP_", "MASTER_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH", "SLURM_JOB_"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
)
"""Prefixes of the environment variables that change torch's behaviour."""


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of the hook 'run', or RunFolder.")],
    out: Annotated[Path, typer.Option(help="The page; an older report is replaced.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is not a report.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the data as JSON, and write no page.")] = False,
) -> None:
    """Write an HTML page about one or several runs.

    Several runs are shown side by side. The page needs no network and no other file.
    """
    from ..report.page import as_data, write_report
    from ..report.run import read_runs

    if out.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"--out {out}: it becomes HTML; give a name that ends in .html")
    try:
        if as_json:
            print(json.dumps(as_data(read_runs(runs))))
            return
        page = write_report(*runs, out=out, replace=force)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    print(f"{page} ({page.stat().st_size / 1024:.0f} KiB)")


def read_configs() -> dict[str, str]:
    """The configs that come with halfmesh: in the installed package, or in the repository."""
    folder = next(one for one in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if (one / "tensor.py").is_file())
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}


def configs(
    name: Annotated[
        str | None, typer.Argument(help="The config to print.", autocompletion=lambda: list(read_configs()))
    ] = None,
) -> None:
    """List the configs that come with halfmesh, or print one."""
    texts = read_configs()
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


def schema() -> None:
    """Print a JSON Schema of configs, for editors.

    It has the keys of installed packages, too.
    """
    from ..config.json_schema import json_schema

    print(json.dumps(json_schema(), indent=2))


def env() -> None:
    """Print what a bug report needs.

    That is versions, devices and environment variables. The report of torch.utils.collect_env comes last; it takes some
    seconds.
    """
    import torch.distributed as dist
    from torch.utils.collect_env import get_pretty_env_info

    from .. import __version__

    packages = []
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages.append(f"{name} {importlib.metadata.version(name)}")
    found = {
        "halfmesh": [__version__],
        "backends": [name for name in ("nccl", "gloo", "mpi") if dist.is_backend_available(name)],
        "packages": packages,
        "plugins": [
            f"{point.group} {point.name} = {point.value}"
            for group in sorted(importlib.metadata.entry_points().groups)
            for point in importlib.metadata.entry_points(group=group)
            if group.startswith("halfmesh.")
        ],
        "variables": [f"{name} {value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)],
    }
    for name, texts in found.items():
        print(f"{name}: {', '.join(texts) or 'none'}")
    print(f"\n{get_pretty_env_info()}")
