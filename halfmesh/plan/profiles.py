"""Profiles of a model, from a few dry runs of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..key_checks import recipe_of
from .candidates import Candidate, Mesh
from .dry_run import try_to_rehearse
from .estimates import Profile
from .model_facts import ModelFacts
from .rehearsal import Figures, Place
from .workers import Workers

_ROWS = (2, 4)
"""Of the batches of two dry runs, from which what grows with the rows and what does not are told apart. (BatchNorm
needs two.)"""

Kind = tuple[str, str]
"""Mode and recomputation."""


def find_profiles(
    kinds: Sequence[Kind],
    workers: Workers,
    model: str,
    batch: tuple[str, ...],
    facts: ModelFacts,
    composes: Callable[[Candidate], bool] = lambda candidate: True,
) -> tuple[dict[Kind, Profile], dict[str, str]]:
    """The profile of each kind, and why there is none of the others, by their names.

    Args:
        composes: whether a mode has such a layout.
    """
    calls, owners = [], []
    for kind in kinds:
        for candidate in filter(composes, _probes(kind, facts)):
            mesh = candidate.mesh
            place = Place(0, mesh.pipeline * mesh.tensor)
            calls.append((candidate.config, model, batch, place, None, candidate.rows))
            owners.append((kind, candidate))
    found: dict[Kind, dict[Mesh, list[Figures]]] = {kind: {} for kind in kinds}
    problems: dict[Kind, str] = {}
    for (kind, candidate), figures in zip(owners, workers.run(try_to_rehearse, calls), strict=True):
        if isinstance(figures, Figures):
            found[kind].setdefault(candidate.mesh, []).append(figures)
        else:
            problems.setdefault(kind, figures[0])
    profiles = {kind: _make(kind, found[kind], facts) for kind in kinds if kind not in problems}
    return profiles, {_name(kind): problem for kind, problem in problems.items()}


def _name(kind: Kind) -> str:
    return kind[0] if kind[1] == "off" else f"{kind[0]} with activation_checkpoint {kind[1]}"


def _probes(kind: Kind, facts: ModelFacts) -> list[Candidate]:
    mode, checkpoint = kind
    one = Candidate(mode, Mesh(1, 1, 1, 1), "replicate", _ROWS[0], checkpoint=checkpoint)
    probes = [one, replace(one, rows=_ROWS[1])]
    tensor, pipeline = _smallest(facts.tensor_sizes), _smallest(facts.pipeline_sizes)
    if tensor:
        probes.append(replace(one, rows=_ROWS[1], mesh=Mesh(1, 1, tensor, 1)))
    if pipeline:
        probes.append(replace(one, rows=_ROWS[1], mesh=Mesh(pipeline, 1, 1, 1), schedule="gpipe"))
    return probes


def _smallest(sizes: Sequence[int]) -> int | None:
    return min((size for size in sizes if size > 1), default=None)


def _make(kind: Kind, found: dict[Mesh, list[Figures]], facts: ModelFacts) -> Profile:
    few, more = _ROWS
    small, large = (figures.parts["activations"] for figures in found[Mesh(1, 1, 1, 1)])
    per_row = max(1.0, (large - small) / (more - few))
    candidate = Candidate(kind[0], Mesh(1, 1, 1, 1), "replicate", 1, checkpoint=kind[1])
    profile = Profile(recipe_of(candidate.config), max(0.0, small - per_row * few), per_row)
    for mesh, (*_, figures) in found.items():
        activations = figures.parts["activations"]
        if mesh.tensor > 1:
            whole = 1 - 1 / mesh.tensor
            numel = (1 - figures.numel / facts.numel) / whole
            fixed = profile.fixed * figures.numel / facts.numel
            divided = (1 - (activations - fixed) / more / per_row) / whole
            sent = figures.traffic.get("tp")
            profile = replace(
                profile,
                numel_divided=numel,
                divided=min(1.0, max(0.0, divided)),
                tensor_row=0.0 if sent is None else (sent.bytes + sent.reduced) / more,
            )
        if mesh.pipeline > 1:
            stage = facts.stages[mesh.pipeline][0]
            fixed = profile.fixed * stage.numel / facts.numel
            blocks = (activations - fixed) / more / (stage.blocks or 1.0)
            profile = replace(
                profile,
                outside=min(1.0, max(0.0, 1 - blocks / per_row)),
                boundary_row=figures.traffic["pp"].bytes / more,
            )
    return profile
