"""`halfmesh report`, `halfmesh configs`, `halfmesh schema` and `halfmesh env`: they only read and show."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError, did_you_mean
from .check import AsJson

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
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="A folder that the hook 'run' or RunFolder wrote.")],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The page. Replaces an older report; its folder must exist.")
    ] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is not a report.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the data as JSON instead of writing a page.")] = False,
) -> None:
    """Write an HTML page about one or several runs.

    Several runs are compared side by side. The page is one file and needs no network.
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


def find_configs() -> dict[str, Path]:
    """The configs that come with halfmesh: in the installed package, or in the repository."""
    found = (sorted((folder / "configs").glob("*.py")) for folder in (_PACKAGE, _PACKAGE.parent))
    return {path.stem: path for path in next(filter(None, found), ())}


def configs(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help=f"The config to print: {', '.join(find_configs())}.",
            autocompletion=lambda: list(find_configs()),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the configs that come with halfmesh, or print one."""
    texts = {stem: path.read_text(encoding="utf-8") for stem, path in find_configs().items()}
    about = {
        stem: next(iter((ast.get_docstring(ast.parse(text)) or "").splitlines()), "") for stem, text in texts.items()
    }
    if name is None:
        width = max(map(len, texts))
        lines = [f"{stem:{width}}  {what}" for stem, what in about.items()]
        print(json.dumps({"configs": about}, indent=2) if as_json else "\n".join(lines))
        return
    stem = name.removesuffix(".py")
    if stem not in texts:
        near = did_you_mean(stem, texts) or f"; there are {', '.join(texts)}"
        raise typer.BadParameter(f"there is no config {name!r}{near}")
    print(
        json.dumps({"name": stem, "about": about[stem], "text": texts[stem]}, indent=2)
        if as_json
        else texts[stem].rstrip("\n")
    )


def schema() -> None:
    """Print a JSON Schema of configs, for editors.

    It includes the modes, axes and strategies of installed packages.
    """
    from ..config.load import json_schema

    print(json.dumps(json_schema(), indent=2))


def env(as_json: AsJson = False) -> None:
    """Print what a bug report needs.

    Lists versions, devices and environment variables. The report of torch.utils.collect_env comes last. It takes some
    seconds.
    """
    import torch.distributed as dist
    from torch.utils.collect_env import get_env_info, pretty_str

    from .. import __version__

    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    found: dict[str, Any] = {
        "halfmesh": __version__,
        "backends": [name for name in ("nccl", "gloo", "mpi") if dist.is_backend_available(name)],
        "packages": packages,
        "plugins": [
            f"{point.group} {point.name} = {point.value}"
            for group in sorted(importlib.metadata.entry_points().groups)
            for point in importlib.metadata.entry_points(group=group)
            if group.startswith("halfmesh.")
        ],
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }
    torch_report = get_env_info()
    if as_json:
        print(json.dumps(found | {"torch": torch_report._asdict()}, indent=2))
        return
    for name, value in found.items():
        texts = [f"{key} {one}" for key, one in value.items()] if isinstance(value, dict) else value
        print(f"{name}: {texts if isinstance(texts, str) else ', '.join(texts) or 'none'}")
    print(f"\n{pretty_str(torch_report)}")
