"""The phases of a verification: its processes, from the config to the report."""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..compat import check_setup
from ..config.composition import Setup
from ..config.load import load_config
from ..distributed.local_ranks import ENGINE, LocalRanks
from ..distributed.rank_process import RankError
from ..errors import InputError, counted, own_frames
from ..parallel.dims import in_words
from ..utils.tensors import dtype_name
from . import layout
from .compare import Limits
from .judge import estimates, judge
from .record import Store
from .report import Difference, Phase, VerifyReport, drawn_in
from .run import Case, Given, compare, estimate, record
from .script import Script

STRUCTURE, UPDATE = 1e-9, 1e-7
"""Allowed in float64, where noise is 1e-14 and faults are 1e-3; UPDATE relative to the way of the weights."""
LEAST = 1e-5
"""The least that is allowed in any other format: sums of many numbers in float32 may cancel."""
ROUNDED = 1e-6
"""A smaller difference may come from casts to float32 in the model."""
ACCUMULATED = "compared with one process that accumulates, without running statistics of BatchNorm"


def verify(
    config: Any,
    build: str | Callable[[], Any],
    *,
    world_size: int,
    updates: int = 2,
    optimizer: str | Callable[[Any], Any] | None = None,
    accumulated: bool = False,
    overrides: Sequence[str] = (),
    shrink: bool | None = None,
    device: str = "cpu",
    timeout: float = 600.0,
    progress: Callable[[str], None] = lambda text: None,
) -> VerifyReport:
    """Prove on this machine that a layout trains `build`'s model as one process does.

    In a script, call it under `if __name__ == "__main__":`, because its processes import the file.

    Args:
        config: a path, a dict or a Config.
        build: a function, or "package.module:function", that returns (model, inputs), or (model, (inputs, targets),
            criterion), as for `halfmesh check --model`. The second element may be a list of batches, used in turn.
        world_size: the number of ranks of the layout.
        updates: how many to compare.
        optimizer: a function of the parameters, or its name; default: SGD with momentum.
        accumulated: compare with one process that accumulates the ranks' batches and microbatches one by one, not with
            one that gets them as one batch: for a loss that compares the samples of a batch with each other.
        overrides: as of `load_config`.
        shrink: use 2 ranks on each axis that has more; the default on a CPU.
        device: "cpu" or "cuda".
        timeout: seconds for each run.
        progress: called with the name of each run that begins.

    Raises:
        ConfigError: the config cannot be loaded.
        InputError: the model cannot be built, or cannot be trained in one process.
    """
    options = Options(world_size, updates, accumulated, overrides, shrink, device, timeout, progress)
    return prove(config, options, Given(build, optimizer), Work)


def verify_script(config: Any, script: str | Path, args: Sequence[str] = (), **options: Any) -> VerifyReport:
    """Prove on this machine that a layout trains what a script trains as one process does.

    The script runs on the ranks of the layout first, and verify keeps the batches that each data rank uses. Then it
    runs in one process, with the batches of all data ranks together, and on the ranks again, with the kept batches. So
    seeds and batches may depend on the number of ranks.

    Args:
        config: a path, a dict or a Config. It decides precision and layout; its other keys go before the script's.
        script, args: run unchanged and several times, in separate processes. Their engines save nothing.
        options: as of `verify`; after `updates` the script is ended.

    Raises:
        ConfigError: the config cannot be loaded.
        InputError: the script fails in the layout, or in one process.
    """
    path, wanted = Path(script), Options(**options)
    if not path.is_file():
        raise InputError(f"cannot read {path}: there is no such script")
    return prove(config, wanted, Script(path, tuple(args), config, tuple(wanted.overrides)), Work)


@dataclass(frozen=True)
class Options:
    """How to verify: see the arguments of `verify`."""

    world_size: int
    updates: int = 2
    accumulated: bool = False
    overrides: Sequence[str] = ()
    shrink: bool | None = None
    device: str = "cpu"
    timeout: float = 600.0
    progress: Callable[[str], None] = lambda text: None


def prove(config: Any, options: Options, given: Any, work: Callable[[Any, Setup, Options], Work]) -> VerifyReport:
    """The report of the phases of the work on a layout, which is shrunk before. `given`: `Given`, or a `Script`."""
    setup = Setup.of(load_config(config, options.overrides), options.world_size)
    findings = check_setup(setup, options.device)
    if not findings and (options.device == "cpu" if options.shrink is None else options.shrink):
        setup = layout.shrink(setup)
        findings = check_setup(setup, options.device)
    problems, phases = list(map(str, findings)), list[Phase]()
    with tempfile.TemporaryDirectory(prefix="halfmesh_verify_") as folder:
        try:
            phases += () if problems else work(given, setup, options).phases(Path(folder))
        except RejectedError as rejected:
            problems, phases = [str(rejected)], []
        except RankError as error:
            raise _untrainable(error) from None  # the message has all of it that is the user's
    first = next((phase.first for phase in phases if phase.first is not None), None)
    ranks = setup.dims.world_size
    shrunk = None if ranks == options.world_size else options.world_size
    is_equal, mesh = not problems and first is None, in_words(setup.dims.sizes)
    return VerifyReport(is_equal, first, tuple(phases), mesh, ranks, shrunk, tuple(problems))


class RejectedError(Exception):
    """The engine rejects the layout."""


def _untrainable(error: RankError) -> InputError:
    return InputError(error.rejection or f"the model cannot be trained in one process: {own_frames(error.text)}")


@dataclass(frozen=True)
class Work:
    """A layout, and what is trained in it."""

    given: Any
    setup: Setup
    options: Options

    def phases(self, folder: Path) -> Iterator[Phase]:
        """Each phase as it ends; a phase that differs is the last."""
        options, notes, dims = self.options, list[str](), self.setup.dims
        case = Case(self.given, self.setup.config, dims.dp, options.updates, options.device, folder / "start")
        case.start.mkdir()
        case = self._survey(case, notes)
        name, kind = next(iter(case.batch_norms.items()), ("", ""))
        mixes = f"module {name!r} ({kind}) normalizes each rank's batch separately" if kind else ""
        why = mixes or ("as asked" if options.accumulated else "")
        calls = case.config.gradient_accumulation if self.given.is_script else 1
        if why:
            calls = case.chunks * case.microbatches
            notes += [f"{why}: {ACCUMULATED}"] if calls > 1 else []
        try:
            phase = self.structure(folder, case, calls)
        except InputError as error:
            if calls >= case.chunks:
                raise
            reason = str(getattr(error.__context__, "reason", error))
            notes.append(
                f"compared with one process that accumulates, because it cannot take the whole batch: {reason}"
            )
            calls = case.chunks
            phase = self.structure(folder, case, calls)
        notes += [file.read_text() for file in sorted(case.start.glob("*.note"))]
        yield replace(phase, notes=(*notes, *phase.notes))
        if phase.equal and (case.dtype is not None or case.config.precision):
            yield self.format(folder, case, calls)

    def _survey(self, case: Case, notes: list[str]) -> Case:
        """The case with what the first run finds. A script runs on all ranks."""
        given, ranks = self.given, self.setup.dims.world_size if self.given.is_script else 1
        self.options.progress(f"{counted(ranks, 'rank')}: reading the model and the batches")
        try:
            known = self._run(ranks, given.survey, (case,))
        except RankError as error:
            if not given.is_script:
                raise
            if case.dtype is not None and re.search("double|float64", error.reason, re.IGNORECASE):
                notes.append(
                    f"compared in float32, not float64, because {given.path.name} sets dtypes itself: {error.reason}"
                )
                return self._survey(replace(case, dtype=None), notes)
            if error.rejection:
                raise RejectedError(error.rejection) from None
            where = f"{given.path}, rank {error.rank} of the layout"
            raise InputError(f"{where}: {own_frames(error.text)}") from None
        found = {name: kind for _, batch_norms in known for name, kind in batch_norms.items()}
        return replace(case, config=known[0][0], batch_norms=found)

    def structure(self, folder: Path, case: Case, calls: int) -> Phase:
        """In float64: compared with one process, whose batch is whole; and with one that accumulates. In float32, of a
        script that sets dtypes itself."""
        began, whole, parts = time.monotonic(), folder / "whole", folder / "parts"
        case = replace(case, config=layout.structure(case.config))
        if case.dtype is None:
            return replace(self.format(folder, case, calls), name="structure")
        self.options.progress("float64: one process")
        jobs = [(case, whole, calls)]
        if case.chunks > calls:
            jobs.append((replace(case, updates=1), parts, case.chunks))
        self._references(jobs)
        self.options.progress(f"float64: {self.setup.dims.world_size} ranks")
        accumulates = len(jobs) > 1 and parts.with_suffix(".index").exists()
        other, limits = parts if accumulates else None, Limits(STRUCTURE, UPDATE, {})
        phase = self._layout(case, whole, calls, other, limits)
        if phase.first is not None and phase.first.difference < ROUNDED:
            self.options.progress("float64: again, because the difference may be rounding")
            case = replace(case, lifts=True)
            self._references([(replace(job, lifts=True), path, times) for job, path, times in jobs])
            limits = self._limits(case, whole, calls, 2.0**-53, calls, limits)
            phase = self._layout(case, whole, calls, other, limits)
            note = "the model computes some parts in float32; the comparison ran them in float64"
            phase = replace(phase, notes=(*phase.notes, note))
        return replace(phase, name="structure", dtype="float64", seconds=time.monotonic() - began)

    def format(self, folder: Path, case: Case, calls: int) -> Phase:
        """In the config's format, compared with the same mode in one process."""
        began, path, recipe, precision = time.monotonic(), folder / "format", self.setup.recipe, case.config.precision
        case, eps = replace(case, config=layout.gentle(case.config), dtype=None), layout.rounding(self.setup)
        if recipe.loss_scale is not None and recipe.loss_scale.dynamic and not self.given.is_script:
            case = replace(case, overflows=1, updates=max(3, case.updates + 1))
        name = f"{precision.label if precision else ''} {dtype_name(recipe.compute_dtype)}".strip()
        self.options.progress(f"{name}: one process")
        self._references([(case, path, calls)])
        least, parts = max(10 * eps, LEAST), calls if self.given.is_script else case.chunks * case.microbatches
        limits = self._limits(case, path, calls, eps, parts, Limits(least, least, {}))
        self.options.progress(f"{name}: {self.setup.dims.world_size} ranks")
        phase = self._layout(case, path, calls, None, limits)
        return replace(phase, name="format", dtype=name, seconds=time.monotonic() - began)

    def _limits(self, case: Case, path: Path, calls: int, eps: float, parts: int, limits: Limits) -> Limits:
        """`limits`, with what a perturbed reference shows; it has an update's batch in `parts` calls."""
        [moved] = self._run(1, estimate, (replace(case, eps=eps), path, calls, parts))
        return replace(limits, estimates=estimates(Store(path), moved, limits.updates, case.config.loss_reduction))

    def _layout(self, case: Case, path: Path, calls: int, parts: Path | None, limits: Limits) -> Phase:
        """Train the layout, and compare it with the reference in `path`."""
        store, reduction = Store(path), case.config.loss_reduction
        try:
            measures = self._run(self.setup.dims.world_size, compare, (case, path, calls, parts))
        except RankError as error:
            known = [] if error.measures is None else [error.measures]
            first = judge(store, known, limits, reduction, case.overflows, is_complete=False).first
            if first is not None:
                after = f"halfmesh rejects it: {error.rejection}" if error.rejection else f"then {error.reason}"
                return Phase("", "", False, replace(first, cause=after))
            if error.rejection:
                raise RejectedError(error.rejection) from error
            what = "hangs" if error.hung else "failed"
            where, text = f"rank {error.rank} {what}: {error.reason}", own_frames(error.text)
            return Phase("", "", False, Difference(0, what, "", math.inf, 0.0, (error.rank,), where, text, ""))
        for rank in measures if calls > 1 else ():
            for key in [key for key in rank.parameters if key.what == "buffer"]:
                if key.name.rpartition(".")[0] in case.batch_norms:
                    del rank.parameters[key]
        phase, drawn = judge(store, measures, limits, reduction, case.overflows), drawn_in(store)
        return replace(phase, notes=(f"the model draws random numbers: {', '.join(drawn)}",)) if drawn else phase

    # -- processes ---------------------------------------------------------------------------------------------

    def _references(self, jobs: Sequence[tuple[Case, Path, int]]) -> None:
        """Side by side, in a process each. Raises InputError if the first fails; of a script the second, which only
        explains differences, may fail: a loop that clips by itself cannot do so after a part of an update."""
        try:
            with ExitStack() as running:
                started = [running.enter_context(self._ranks(1)) for _ in jobs]
                for ranks, job in zip(started, jobs, strict=True):
                    ranks.begin(record, job, timeout=self.options.timeout, group=False)
                started[0].wait()
                for ranks in started[1:]:
                    with suppress(RankError) if self.given.is_script else nullcontext():
                        ranks.wait()
        except RankError as error:
            raise _untrainable(error) from None

    def _run(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        with self._ranks(world_size) as ranks:
            group = world_size > 1 and not self.given.is_script
            return ranks.call(function, args, timeout=self.options.timeout, group=group)

    def _ranks(self, world_size: int) -> AbstractContextManager[LocalRanks]:
        return LocalRanks(world_size, self.options.device, (*ENGINE, "halfmesh.verify.run", self.given.preload))
