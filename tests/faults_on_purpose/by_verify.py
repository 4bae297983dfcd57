"""Verifies layouts that have a fault: ranks in processes that stay, each reference once and in this process."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from halfmesh.verify import layout, phases
from halfmesh.verify.report import Phase, VerifyReport
from halfmesh.verify.run import compare, record
from halfmesh.verify.subject import Case
from tests.support.proofs import LEFT_OUT, TeamWork

from . import users
from .fault import Fault, In, Text, put
from .workloads import given


def compare_faulty(texts: Sequence[Text], args: Sequence[Any]) -> Any:
    """`compare` with a fault, which is put in before the engine is made."""
    with put(texts):
        return compare(*args)


@dataclass(frozen=True)
class FaultyWork(TeamWork):
    """
    Attributes:
        texts: the fault of the ranks.
        known: references by what they depend on; each is made once, in `folder`.
    """

    texts: Sequence[Text] = ()
    known: dict[bytes, Path] = field(default_factory=dict)
    folder: Path = Path()

    def structure(self, folder: Path, case: Case, calls: int) -> Phase:
        """Only of what has no mode, for which the format is left out."""
        return LEFT_OUT if case.config.precision else super().structure(folder, case, calls)

    def format(self, folder: Path, case: Case, calls: int) -> Phase:
        return super().format(folder, case, calls) if case.config.precision else LEFT_OUT

    def _run(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        if function is record:
            case, path, calls = args
            alone = layout.reference(case.config, calls)
            config = (alone.clip_grad_norm, alone.loss_reduction) if case.dtype else alone.model_dump()
            counts = case.chunks, case.microbatches, case.config.parallel.sizes.get("expert", 1), calls
            key = pickle.dumps((config, replace(case, config=None, start=None), counts))
            if key not in self.known:
                self.known[key] = self.folder / str(len(self.known))
                record(case, self.known[key], calls)
            path.symlink_to(self.known[key])
            return [None]
        if function is compare and world_size > 1:
            function, args = compare_faulty, (self.texts, args)
        return super()._run(world_size, function, args)


Verify = Callable[[Fault, In, bool], VerifyReport]
"""What verify finds of a fault in a layout; or without the fault, if it is one of the engine."""


@contextmanager
def verifying() -> Iterator[Verify]:
    """A scope in which faults are verified one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        known: dict[bytes, Path] = {}

        def verify(fault: Fault, place: In, is_faulty: bool = True) -> VerifyReport:
            build = place.build or partial(*((given, place.cell.model) if fault.texts else (users.make, fault.what)))
            options = {"texts": fault.texts if is_faulty else (), "known": known, "folder": Path(folder)}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(phases, "Work", lambda *args: FaultyWork(*args, **options))
                return phases.verify(place.config(), build, world_size=place.cell.world_size, timeout=60.0)

        yield verify


def said(found: VerifyReport) -> str:
    """ "kind name; sentence" of the first difference; "" of none."""
    if found.problems:
        return f"rejected {'; '.join(found.problems)}"
    first = found.first
    return "" if first is None else f"{first.what} {first.module}; {first.where}"


def judged(place: In, report: VerifyReport) -> str:
    """Whether the place that is named first is right: "right", "another" or "missed"."""
    words = said(report)
    return "right" if place.is_right(words) else "another" if words else "missed"
