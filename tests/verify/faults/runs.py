"""Runs `halfmesh verify` on many faults: ranks in processes that stay, each reference once and in this process."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from halfmesh.verify import layout, phases
from halfmesh.verify.report import VerifyReport
from halfmesh.verify.run import Case, compare, record
from tests.support.ranks import run_ranks

from .corpus import FAULTS, Fault


def run_faulty(rank: int, world_size: int, number: int | None, args: Sequence[Any]) -> Any:
    """`compare` with a fault, which is put in before the engine is made."""
    with pytest.MonkeyPatch.context() as patch:
        if number is not None:
            FAULTS[number].apply(patch)
        return compare(*args)


@dataclass(frozen=True)
class QuickWork(phases.Work):
    """Without new processes for each run.

    Attributes:
        fault: its number; None: the engine has none.
        known: references by what they depend on.
    """

    fault: int | None = None
    known: dict[bytes, Path] = field(default_factory=dict)
    folder: Path = Path()

    def _references(self, jobs: Sequence[tuple[Case, Path, int]]) -> None:
        for case, path, calls in jobs:
            alone = layout.reference(case.config, calls)
            config = (alone.clip_grad_norm, alone.loss_reduction) if case.dtype else alone.model_dump()
            counts = case.chunks, case.microbatches, case.config.parallel.sizes.get("expert", 1), calls
            key = pickle.dumps((config, replace(case, config=None, start=None), counts))
            if key not in self.known:
                self.known[key] = self.folder / str(len(self.known))
                record(case, self.known[key], calls)
            for suffix in ("", ".index"):
                path.with_suffix(suffix).unlink(missing_ok=True)
                path.with_suffix(suffix).symlink_to(self.known[key].with_suffix(suffix))

    def _run(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        if function is not compare:
            return [function(*args)]
        return run_ranks(run_faulty, world_size, self.fault, args, timeout=self.options.timeout)


class Runs:
    """Verifies one fault after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[bytes, Path] = {}

    def report(self, fault: Fault, is_clean: bool = False) -> VerifyReport:
        """What verify finds. `is_clean`: without the fault, if it is one of the engine."""
        number = None if is_clean or fault.is_users else FAULTS.index(fault)

        def work(*args: Any) -> QuickWork:
            return QuickWork(*args, fault=number, known=self._known, folder=self._folder)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(phases, "Work", work)
            return phases.verify(fault.config(), fault.builder, world_size=fault.cell.world_size, timeout=60.0)


@contextmanager
def runs() -> Iterator[Runs]:
    """A scope in which faults are verified."""
    with tempfile.TemporaryDirectory() as folder:
        yield Runs(Path(folder))


def said(found: VerifyReport) -> str:
    """ "kind name; sentence" of the first difference; "" of none."""
    if found.problems:
        return f"refused {'; '.join(found.problems)}"
    first = found.first
    return "" if first is None else f"{first.what} {first.module}; {first.where}"
