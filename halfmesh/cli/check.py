"""`halfmesh check`: whether a config can run, and what a run of it would be."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from ..config import Config
    from ..key_checks import Finding


def check(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="The config: a .py, .yaml, .yml or .json file.")],
    world_size: Annotated[int, typer.Option(help="The number of ranks the run would have.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE, such as parallel.tensor=2; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="The kind of device: cuda or cpu.")] = "cuda",
    model: Annotated[
        str | None, typer.Option(help="package.module:build, which builds the model: plan a whole update with it.")
    ] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option(help="With --model: an input as a data rank's loader gives it, such as 8,2048:int64; repeatable."),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="With --model: what one device has, such as 80GB or 80GiB.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="With --model: draw who holds what, a .png or .svg file.")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="With --picture: mark the nodes, of so many devices.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="With --picture: replace a file that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether a config can run, and what is wrong with it.

    All mistakes are listed at once. Needs no GPU. The exit status is 0 if the config can run (with --gpu-memory: and
    fits), else 1.

    With --model one rank of each kind does an update on tensors without memory: what it holds, and what it sends.
    build() returns the model; or (model, inputs); or (model, (inputs, targets), criterion).
    """
    from ..compat import check as find
    from ..compat import get_layout
    from ..config.load import load_leniently
    from ..key_checks import find_advice

    with contextlib.redirect_stdout(sys.stderr):  # what a .py config prints is not part of the answer
        loaded, problems = load_leniently(config, overrides or ())
    findings = find(loaded, world_size, device) if loaded else []
    right = bool(loaded) and not problems and not findings
    if loaded and get_layout(loaded, world_size).data > 1:
        findings += find_advice(loaded)
    for option, is_given in (("--gpus-per-node", gpus_per_node is not None), ("--force", force)):
        if is_given and picture is None:
            raise typer.BadParameter(f"{option} says something about --picture, which is missing")
    if model is None:
        if batch or gpu_memory or picture:
            raise typer.BadParameter(
                "--batch, --gpu-memory and --picture say something about --model, which is missing"
            )
        planned = None
    else:
        with contextlib.redirect_stdout(sys.stderr):
            if picture is not None:
                _refuse_picture(picture, gpus_per_node, force)
            planned = _Planned(
                loaded, right, world_size, device, model, tuple(batch or ()), gpu_memory, bool(context.obj)
            )
            if picture is not None:
                planned.draw(picture, gpus_per_node)
        right = right and not planned.problems
    plan = _plan(loaded, world_size) if loaded and right else None
    if as_json:
        answer = _as_json(problems, findings, plan)
        print(json.dumps(answer if planned is None else answer | planned.as_json(plan is not None), indent=2))
    else:
        _print(config, world_size, problems, findings, plan, planned)
    raise typer.Exit(0 if plan and (planned is None or planned.fits) else 1)


def _refuse_picture(path: Path, node: int | None, may_replace: bool) -> None:
    from ..errors import InputError
    from ..plan import picture

    if node is not None and node < 1:
        raise typer.BadParameter(f"--gpus-per-node {node}: it must be at least 1")
    try:
        picture.refuse_path(path, may_replace)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None


class _Planned:
    """What a dry run of the model has found."""

    def __init__(
        self,
        config: Config | None,
        right: bool,
        world_size: int,
        device: str,
        model: str,
        batch: tuple[str, ...],
        memory: str | None,
        is_fresh: bool,
    ) -> None:
        from ..errors import InputError
        from ..memory import parse_bytes
        from ..plan import dry_run, show

        try:
            self.limit = None if memory is None else parse_bytes(memory)
        except InputError as error:
            raise typer.BadParameter(f"--gpu-memory {error}") from None
        self._run: dry_run.DryRun | None = None
        self._show = show
        self._config, self._model, self._batch = config, model, batch
        self.problems: list[str] = []
        if config is None:
            return
        if not right:
            self.problems = dry_run.find_model_problems(config, world_size, model)
            return
        run = dry_run.dry_run(config, world_size, model, batch, is_fresh)
        self.problems = run.problems
        self._run = None if run.problems else run

    @property
    def fits(self) -> bool:
        """Whether a device has enough memory, as far as it is known."""
        return self._run is None or self.limit is None or self._show.fits(self._run, self.limit)

    def draw(self, path: Path, node: int | None) -> None:
        """Draw who holds what, if it can run."""
        from ..plan import picture

        if self._run is not None and self._config is not None:
            picture.draw(path, self._config, self._run, self._model, self._batch, node)

    def as_json(self, can_run: bool) -> dict[str, Any]:
        run = None if self._run is None else self._show.as_json(self._run, self.limit)
        return {"ok": can_run and self.fits, "model_problems": self.problems, "dry_run": run}

    def lines(self) -> list[str]:
        return [] if self._run is None else list(self._show.lines(self._run, self.limit))


def _plan(config: Config, world_size: int) -> dict[str, Any]:
    """What the run would be."""
    from ..compat import get_layout
    from ..key_checks import recipe_of

    layout, mesh = get_layout(config, world_size), config.parallel.mesh_sizes
    return {
        "mode": config.precision.label if config.precision else None,
        "dtype": str(recipe_of(config).compute_dtype).removeprefix("torch."),
        "mesh": {"pp": layout.pipeline, "dp": layout.data} | {k: n for k, n in mesh.items() if k != "pp"},
        "data_strategy": config.parallel.data.strategy,
        "gradient_accumulation": config.gradient_accumulation,
        "global_batch_size": config.global_batch_size,
        "clip_grad_norm": config.clip_grad_norm.max_norm or None,
    }


def _as_json(problems: list[str], findings: list[Finding], plan: dict[str, Any] | None) -> dict[str, Any]:
    rows = [{"kind": finding.kind, "where": finding.where, "message": finding.message} for finding in findings]
    return {"ok": plan is not None, "problems": problems, "findings": rows, "plan": plan}


def _print(
    path: Path,
    world_size: int,
    problems: list[str],
    findings: list[Finding],
    plan: dict[str, Any] | None,
    planned: _Planned | None,
) -> None:
    console = Console(highlight=False)

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    if plan:
        mesh = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
        fits = planned is None or planned.fits
        say(
            f"{path}: can run on {world_size} rank(s)" + ("" if fits else ", but does not fit"),
            "green" if fits else "red",
        )
        say(f"  mode {plan['mode'] or 'none'}, {plan['dtype']}")
        say(f"  mesh {mesh}, data strategy {plan['data_strategy']}")
        clip = plan["clip_grad_norm"] or "off"
        total, cycle = plan["global_batch_size"], plan["gradient_accumulation"]
        batches = f"gradient_accumulation {cycle}" if total is None else f"global_batch_size {total}"
        say(f"  {batches}, clip_grad_norm {clip}")
        for finding in findings:
            say(f"  advice: {finding}", "yellow")
        for line in planned.lines() if planned else ():
            say(line)
        return
    say(f"{path}: cannot run on {world_size} rank(s)", "red")
    refused = [str(finding) for finding in findings if finding.kind == "refused"]
    for title, lines in (
        ("config problems", problems),
        ("refused", refused),
        ("advice", [str(finding) for finding in findings if finding.kind == "advice"]),
        ("problems with the model", planned.problems if planned else []),
    ):
        if lines:
            say(f"{title}:", "bold")
        for line in lines:
            say(f"  - {line}")
