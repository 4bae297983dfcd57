"""The phases of a verification: its processes, from the config to the report."""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..compat import check_setup
from ..config.composition import Setup
from ..config.load import load_config
from ..distributed.local_ranks import ENGINE, LocalRanks, RankError
from ..errors import InputError, counted, own_frames
from ..parallel.dims import in_words
from ..utils.tensors import dtype_name
from . import layout
from .compare import Limits
from .judge import estimates, judge
from .record import Store
from .report import Difference, Phase, VerifyReport
from .run import compare, record
from .script import Script
from .subject import Case, Given

STRUCTURE, UPDATE = 1e-9, 1e-7
"""Allowed in float64, where noise is 1e-14 and faults are 1e-3; UPDATE relative to the way of the weights."""
LEAST = 1e-5
"""The least that is allowed in any other format: sums of many numbers in float32 may cancel."""
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
    return prove(config, options, Given(build, optimizer))


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
    return prove(config, wanted, Script(path, tuple(args), config, tuple(wanted.overrides)))


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


def prove(config: Any, options: Options, given: Any) -> VerifyReport:
    """The report of the phases of a layout, which is shrunk before. `given`: `Given`, or a `Script`."""
    setup = Setup.of(load_config(config, options.overrides), options.world_size)
    findings = check_setup(setup, options.device)
    if not findings and (options.device == "cpu" if options.shrink is None else options.shrink):
        setup = layout.shrink(setup)
        findings = check_setup(setup, options.device)
    problems, phases = list(map(str, findings)), list[Phase]()
    with tempfile.TemporaryDirectory(prefix="halfmesh_verify_") as folder:
        try:
            phases += () if problems else Work(given, setup, options).phases(Path(folder))
        except RankError as error:  # the engine rejects the layout
            problems, phases = [error.rejection], []
    first = next((phase.first for phase in phases if phase.first is not None), None)
    ranks = setup.dims.world_size
    shrunk = None if ranks == options.world_size else options.world_size
    is_equal, mesh = not problems and first is None, in_words(setup.dims.sizes)
    return VerifyReport(is_equal, first, tuple(phases), mesh, ranks, shrunk, tuple(problems))


@dataclass(frozen=True)
class Work:
    """A layout, and what is trained in it. Raises RankError where the engine rejects the layout."""

    given: Any
    setup: Setup
    options: Options

    def phases(self, folder: Path) -> Iterator[Phase]:
        """Each phase as it ends; a phase that differs is the last."""
        options, dims = self.options, self.setup.dims
        case = Case(self.given, self.setup.config, dims.dp, options.updates, options.device, folder / "start")
        case.start.mkdir()
        case, notes = self._survey(case)
        calls = case.config.gradient_accumulation if self.given.is_script else 1
        name, kind = next(iter(case.batch_norms.items()), ("", ""))
        mixes = f"module {name!r} ({kind}) normalizes each rank's batch separately" if kind else ""
        if mixes or options.accumulated:
            calls = case.chunks * case.microbatches
            notes += [f"{mixes or 'as asked'}: {ACCUMULATED}"] if calls > 1 else []
        phase = self.structure(folder, case, calls)
        notes += [file.read_text() for file in sorted(case.start.glob("*.note"))]
        yield replace(phase, notes=tuple(notes))
        if phase.equal and (case.dtype is not None or case.config.precision):
            yield self.format(folder, case, calls)

    def _survey(self, case: Case) -> tuple[Case, list[str]]:
        """The case with what the first run finds, and notes. A script runs on all ranks."""
        given, ranks, notes = self.given, self.setup.dims.world_size if self.given.is_script else 1, list[str]()
        self.options.progress(f"{counted(ranks, 'rank')}: reading the model and the batches")
        if not given.is_script:
            known = [self._alone(given.survey, case)]
        else:
            try:
                known = self._run(ranks, given.survey, (case,))
            except RankError as error:
                if case.dtype is not None and re.search("double|float64", error.reason, re.IGNORECASE):
                    why = f"{given.path.name} sets dtypes itself: {error.reason}"
                    case, notes = self._survey(replace(case, dtype=None))
                    return case, [f"compared in float32, not float64, because {why}", *notes]
                if error.rejection:
                    raise
                where = f"{given.path}, rank {error.rank} of the layout"
                raise InputError(f"{where}: {own_frames(error.text)}") from None
        batch_norms = {name: kind for _, found in known for name, kind in found.items()}
        return replace(case, config=known[0][0], batch_norms=batch_norms), notes

    def structure(self, folder: Path, case: Case, calls: int) -> Phase:
        """In float64; in float32, of a script that sets dtypes itself."""
        began, path = time.monotonic(), folder / "structure"
        case = replace(case, config=layout.structure(case.config))
        if case.dtype is None:
            return replace(self.format(folder, case, calls), name="structure")
        self.options.progress("float64: one process")
        self._alone(record, case, path, calls)
        self.options.progress(f"float64: {self.setup.dims.world_size} ranks")
        phase = self._layout(case, path, calls, Limits(STRUCTURE, UPDATE, {}))
        first = phase.first
        if first is not None and first.cause.startswith("the criterion") and calls < case.chunks:
            phase = replace(phase, first=replace(first, cause=first.cause + self._accumulated(folder, case)))
        return replace(phase, name="structure", dtype="float64", seconds=time.monotonic() - began)

    def _accumulated(self, folder: Path, case: Case) -> str:
        """The end of the cause of a difference if the result is that of one process that accumulates, else ""."""
        path, case = folder / "accumulated", replace(case, updates=1)
        with suppress(InputError):  # a loop that clips by itself cannot do so after a part of an update
            self._alone(record, case, path, case.chunks)
            if self._layout(case, path, case.chunks, Limits(STRUCTURE, UPDATE, {})).equal:
                return ": the result equals that of one process that accumulates the ranks' batches"
        return ""

    def format(self, folder: Path, case: Case, calls: int) -> Phase:
        """In the config's format, compared with the same mode in one process."""
        began, path, recipe, precision = time.monotonic(), folder / "format", self.setup.recipe, case.config.precision
        case, eps = replace(case, config=layout.gentle(case.config), dtype=None), layout.rounding(self.setup)
        if recipe.loss_scale is not None and recipe.loss_scale.dynamic and not self.given.is_script:
            case = replace(case, overflows=1, updates=max(3, case.updates + 1))
        name = f"{precision.label if precision else ''} {dtype_name(recipe.compute_dtype)}".strip()
        self.options.progress(f"{name}: one process")
        self._alone(record, case, path, calls)
        least, parts = max(10 * eps, LEAST), calls if self.given.is_script else case.chunks * case.microbatches
        moved = self._alone(compare, replace(case, eps=eps), path, calls, parts)
        found = estimates(Store(path), moved, least, case.config.loss_reduction)
        self.options.progress(f"{name}: {self.setup.dims.world_size} ranks")
        phase = self._layout(case, path, calls, Limits(least, least, found))
        return replace(phase, name="format", dtype=name, seconds=time.monotonic() - began)

    def _layout(self, case: Case, path: Path, calls: int, limits: Limits) -> Phase:
        """Train the layout, and compare it with the reference in `path`."""
        store, reduction = Store(path), case.config.loss_reduction
        try:
            measures = self._run(self.setup.dims.world_size, compare, (case, path, calls))
        except RankError as error:
            known = [] if error.measures is None else [error.measures]
            first = judge(store, known, limits, reduction, case.overflows, is_complete=False).first
            if first is not None:
                after = f"halfmesh rejects it: {error.rejection}" if error.rejection else f"then {error.reason}"
                return Phase("", "", False, replace(first, cause=after))
            if error.rejection:
                raise
            what = "hangs" if error.hung else "failed"
            where, text = f"rank {error.rank} {what}: {error.reason}", own_frames(error.text)
            return Phase("", "", False, Difference(0, what, "", math.inf, 0.0, (error.rank,), where, text, ""))
        for rank in measures if calls > 1 else ():
            for key in [key for key in rank.tensors if key.what == "buffer"]:
                if key.name.rpartition(".")[0] in case.batch_norms:
                    del rank.tensors[key]
        return judge(store, measures, limits, reduction, case.overflows)

    # -- processes ---------------------------------------------------------------------------------------------

    def _alone(self, function: Callable[..., Any], *args: Any) -> Any:
        """In one process. Raises InputError if it fails."""
        try:
            [made] = self._run(1, function, args)
        except RankError as error:
            reason = f"it fails in one process (--accumulated gives it batch by batch): {own_frames(error.text)}"
            raise InputError(error.rejection or reason) from None
        return made

    def _run(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        preload = (*ENGINE, "halfmesh.verify.run", self.given.preload)
        group = world_size > 1 and not self.given.is_script  # which makes its own
        with LocalRanks(world_size, self.options.device, preload) as ranks:
            return ranks.call(function, args, timeout=self.options.timeout, group=group)
