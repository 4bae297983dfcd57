"""The phases of a verification: its processes, from the config to the report."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..compat import check_setup
from ..config import Config
from ..config.composition import Setup
from ..config.load import load_config
from ..distributed.local_ranks import ENGINE, LocalRanks
from ..distributed.rank_process import RankError
from ..errors import InputError, own_frames
from ..parallel.deferred.creation import named_tensors
from ..parallel.dims import in_words
from ..utils.tensors import count_rows, dtype_name
from ..utils.torch_private import BATCH_NORMS
from . import layout
from .compare import Measures
from .judge import Limits, differences, direct_in, drawn_in, judge, loss_of
from .record import Key, Store
from .report import Difference, Phase, VerifyReport, direct_use
from .run import Case, estimate, record_engine, record_plain, run_rank
from .subject import Given, join

STRUCTURE, UPDATE = 1e-9, 1e-7
"""Allowed in float64, where noise is 1e-14 and faults are 1e-3; UPDATE relative to the way of the weights."""
LEAST = 1e-5
"""The least that is allowed in any other format: sums of many numbers in float32 may cancel."""
FLIPS = 16
"""Elements of a gradient that rounding may switch on or off, where ReLU, max or top-k decide: more than a single
perturbed run shows, and few of a large tensor."""
ROUNDED = 1e-6
"""A smaller difference may come from casts to float32 in the model."""

ACCUMULATED = "compared with one process that accumulates, without running statistics of BatchNorm"


@dataclass(frozen=True)
class Survey:
    """Facts about a model before it is trained.

    Attributes:
        rows: of one batch.
        joins: the batches of several ranks can be put together.
        mixes: names of BatchNorms, whose statistics are those of a call.
    """

    rows: int
    joins: bool
    mixes: tuple[str, ...]


def survey(case: Case, start: Path) -> Survey:
    """Build the model, look at it, and write weights and batches for all runs. Raises InputError if there is nothing to
    verify."""
    subject = replace(case, dtype=None).subject()
    if not any(param.requires_grad for param in subject.model.parameters()):
        raise InputError("the model has no parameters that require gradients, so there is nothing to train")
    torch.save((dict(named_tensors(subject.model)), subject.batches), start)
    if len(subject.batches) == 1 and count_rows(subject.batches[0]) < 2 and case.chunks > 1:
        raise InputError(
            f"the batch has one row, so {case.chunks} batches of an update would be the same, and prove nothing; give "
            "it several rows, from which they are drawn, or return a list of batches"
        )
    try:
        join([subject.batch(0, chunk, case.chunks) for chunk in range(case.chunks)])
        joins = True
    except (RuntimeError, ValueError):
        joins = False
    kinds = subject.model.named_modules()
    mixes = tuple(name for name, module in kinds if isinstance(module, BATCH_NORMS))
    return Survey(count_rows(subject.batches[0]), joins, mixes)


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

    Args:
        config: a path, a dict or a Config.
        build: a function, or "package.module:function", that returns (model, inputs), or (model, (inputs, targets),
            criterion), as for `halfmesh check --model`; a list in place of the second is of batches, used in turn.
        world_size: the number of ranks of the layout.
        updates: how many to compare.
        optimizer: a function of the parameters, or its name; default: SGD with momentum.
        accumulated: compare with one process that accumulates the ranks' batches and microbatches one by one, in place
            of one that has them in one batch: for a loss that compares the samples of a batch with each other.
        overrides: as of `load_config`.
        shrink: take 2 ranks on each axis that has more; default: on a CPU.
        device: "cpu" or "cuda".
        timeout: seconds for each run.
        progress: is told what begins.

    Raises:
        ConfigError: the config cannot be loaded.
        InputError: the model cannot be built, or not be trained in one process.
    """
    options = Options(world_size, updates, accumulated, overrides, shrink, device, timeout, progress)
    return prove(config, options, lambda _: Given(build, optimizer), Work)


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


def prove(
    config: Any, options: Options, find_given: Callable[[Config], Any], work: Callable[[Any, Setup, Options], Work]
) -> VerifyReport:
    """The report of the phases of the work on a layout, which is shrunk before."""
    setup = Setup.of(load_config(config, options.overrides), options.world_size)
    findings = check_setup(setup, options.device)
    if not findings and (options.device == "cpu" if options.shrink is None else options.shrink):
        setup = layout.shrink(setup)
        findings = check_setup(setup, options.device)
    problems, phases = list(map(str, findings)), list[Phase]()
    with tempfile.TemporaryDirectory(prefix="halfmesh_verify_") as folder:
        try:
            phases += () if problems else work(find_given(setup.config), setup, options).phases(Path(folder))
        except RefusedError as refused:
            problems, phases = [str(refused)], []
        except RankError as error:
            raise _untrainable(error) from None  # the message has all of it that is the user's
    first = next((phase.first for phase in phases if phase.first is not None), None)
    ranks = setup.dims.world_size
    shrunk = None if ranks == options.world_size else options.world_size
    is_equal, mesh = not problems and first is None, in_words(setup.dims.sizes)
    return VerifyReport(is_equal, first, tuple(phases), mesh, ranks, shrunk, tuple(problems))


class RefusedError(Exception):
    """The engine refuses the layout."""


def _untrainable(error: RankError) -> InputError:
    return InputError(error.refusal or f"the model cannot be trained in one process: {own_frames(error.text)}")


@dataclass(frozen=True)
class Work:
    """A layout and a model."""

    given: Any
    setup: Setup
    options: Options

    # What runs in the processes; whether the loss of an update can be made inf; whether ranks have a process group.
    _plain: ClassVar[Any] = staticmethod(record_plain)
    _engine: ClassVar[Any] = staticmethod(record_engine)
    _estimate: ClassVar[Any] = staticmethod(estimate)
    _rank: ClassVar[Any] = staticmethod(run_rank)
    _overflows: ClassVar[bool] = True
    _has_group: ClassVar[bool] = True

    def phases(self, folder: Path) -> Any:
        """Each phase as it ends; a phase that differs is the last."""
        dims, options = self.setup.dims, self.options
        case = Case(self.given, self.setup.config, self._chunks(self.setup.config), options.updates, options.device)
        case = replace(case, multiple=math.lcm(case.microbatches, dims.sizes.get("ep", 1)))
        options.progress("building the model")
        [known] = self._run(1, survey, (case, folder / "start"))
        case = replace(case, config=layout.settle(case.config, known.rows * dims.dp))
        case = replace(case, chunks=self._chunks(case.config), mixes=known.mixes, start=folder / "start")
        why = self._why_by_itself(case)
        calls = case.chunks * case.microbatches if why else 1 if known.joins else case.chunks
        notes = [f"{why or 'the batches differ in shape'}: {ACCUMULATED}"] if calls > 1 else []
        phase = self.structure(folder, replace(case, config=layout.structure(case.config)), calls)
        yield replace(phase, notes=(*notes, *phase.notes))
        if phase.equal:
            yield self.format(folder, replace(case, config=layout.gentle(case.config), dtype=None), calls)

    def _why_by_itself(self, case: Case) -> str:
        """Why the reference has the ranks' batches one by one; "" if it has them in one."""
        mixes = f"{case.mixes[0]} normalises each batch by itself" if case.mixes else ""
        return mixes or ("as asked" if self.options.accumulated else "")

    def structure(self, folder: Path, case: Case, calls: int) -> Phase:
        """In float64: beside a plain loop, whose batch is whole; and beside one that accumulates."""
        began, whole, parts = time.monotonic(), folder / "whole", folder / "parts"
        self.options.progress("float64: one process")
        jobs = [(self._plain, (case, whole, calls))]
        if case.chunks > calls:
            jobs.append((self._plain, (replace(case, updates=1), parts, case.chunks)))
        self._references(jobs)
        self.options.progress(f"float64: {self.setup.dims.world_size} ranks")
        other, limits = parts if len(jobs) > 1 else None, Limits(STRUCTURE, UPDATE, {})
        phase = self._layout(case, whole, calls, other, limits)
        if phase.first is not None and phase.first.difference < ROUNDED:
            self.options.progress("float64: once more, since the difference may be rounding")
            lifted = replace(case, lifts=True)
            self._references([(function, (replace(args[0], lifts=True), *args[1:])) for function, args in jobs])
            [moved] = self._run(1, self._estimate, (lifted, whole, calls, 2.0**-53))
            limits = replace(limits, estimates=estimates(Store(whole), moved, UPDATE, case.config.loss_reduction))
            phase = self._layout(lifted, whole, calls, other, limits)
            note = "the model computes in float32 in places; for the proof these were lifted to float64"
            phase = replace(phase, notes=(*phase.notes, note))
        return replace(phase, name="structure", dtype="float64", seconds=time.monotonic() - began)

    def format(self, folder: Path, case: Case, calls: int) -> Phase:
        """In the config's format, beside the same mode in one process."""
        began, path, recipe = time.monotonic(), folder / "format", self.setup.recipe
        label = case.config.precision.label if case.config.precision else ""
        eps = rounding(self.setup)
        if recipe.loss_scale is not None and recipe.loss_scale.dynamic and self._overflows:
            case = replace(case, overflows=1, updates=max(3, case.updates + 1))
        name = f"{label} {dtype_name(recipe.compute_dtype)}".strip()
        self.options.progress(f"{name}: one process")
        self._references([(self._engine, (case, path, calls))])
        [moved] = self._run(1, self._estimate, (case, path, calls, eps, case.chunks * case.microbatches))
        self.options.progress(f"{name}: {self.setup.dims.world_size} ranks")
        least = max(10 * eps, LEAST)
        limits = Limits(least, least, estimates(Store(path), moved, least, case.config.loss_reduction))
        phase = self._layout(case, path, calls, None, limits)
        return replace(phase, name="format", dtype=name, seconds=time.monotonic() - began)

    def _layout(self, case: Case, path: Path, calls: int, parts: Path | None, limits: Limits) -> Phase:
        """Train the layout, and compare it with the reference in `path`."""
        store, reduction = Store(path), case.config.loss_reduction
        try:
            measures = self._run(self.setup.dims.world_size, self._rank, (case, path, calls, parts))
        except RankError as error:
            known = [] if error.measures is None else [error.measures]
            direct = direct_use(direct_in(store, known))
            hint = f"\nlikely cause: {direct}" if direct else ""
            if known:
                phase = judge(store, known, limits, reduction, case.overflows, is_complete=False)
                if phase.first is not None:
                    after = f"halfmesh refuses it: {error.refusal}" if error.refusal else f"then {error.reason}"
                    cause = "; ".join(filter(None, [direct, after]))
                    return replace(phase, first=replace(phase.first, cause=cause))
            if error.refusal:
                raise RefusedError(error.refusal + hint) from error
            what = "hangs" if error.hung else "failed"
            where, text = f"rank {error.rank} {what}: {error.reason}", own_frames(error.text) + hint
            return Phase("", "", False, Difference(0, what, "", math.inf, 0.0, (error.rank,), where, text, ""))
        for rank in measures if calls > 1 else ():
            for key in [k for k in rank.parameters if k.what == "buffer" and k.name.rpartition(".")[0] in case.mixes]:
                del rank.parameters[key]
        phase, drawn = judge(store, measures, limits, reduction, case.overflows), drawn_in(store)
        return replace(phase, notes=(f"the model draws random numbers: {', '.join(drawn)}",)) if drawn else phase

    def _references(self, jobs: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
        """Side by side, in a process each. Raises InputError if one fails."""
        try:
            with ExitStack() as running:
                started = [running.enter_context(self._ranks(1)) for _ in jobs]
                for ranks, (function, args) in zip(started, jobs, strict=True):
                    ranks.begin(function, args, timeout=self.options.timeout, group=False)
                for ranks in started:
                    ranks.wait()
        except RankError as error:
            raise _untrainable(error) from None

    def _run(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        with self._ranks(world_size) as ranks:
            group = self._has_group and world_size > 1
            return ranks.call(function, args, timeout=self.options.timeout, group=group)

    def _ranks(self, world_size: int) -> AbstractContextManager[LocalRanks]:
        build = self.given.build
        own = build if isinstance(build, str) else f"{build.__module__}:{build.__qualname__}"
        return LocalRanks(world_size, self.options.device, (*ENGINE, "halfmesh.verify.run", own))

    def _chunks(self, config: Config) -> int:
        return self.setup.dims.dp * config.gradient_accumulation


def rounding(setup: Setup) -> float:
    """Of the formats in which a config computes and reduces, the largest relative error of rounding."""
    recipe = setup.recipe
    dtypes = [recipe.compute_dtype, getattr(torch, setup.config.parallel.data.reduce_dtype)]
    return 2.0**-4 if recipe.linear is not None else max(torch.finfo(dtype).eps / 2 for dtype in dtypes)


def estimates(store: Store, moved: Measures, updates: float, reduction: str) -> Mapping[Key, float]:
    """How far the perturbed reference is from the reference, by key."""
    found = {key: max(by_rank.values()) for key, by_rank in differences(store, [moved], updates).items()}
    for key in [key for key in found if key.what == "gradient"]:  # one update may hit it by chance: of all the largest
        found[key] = max(found.get(key._replace(update=update), 0.0) for update, *_ in moved.figures)
    for update in {update for update, *_ in moved.figures}:
        norms = [run.figures.get((update, 0, "grad_norm")) or 0.0 for run in (moved, store)]
        losses = [loss_of([run], update, reduction) for run in (moved, store)]
        for what, (mine, theirs) in (("norm", norms), ("loss", losses)):
            found[Key(update, 0, what, "")] = abs(mine - theirs) / max(abs(theirs), 1e-12)
    for key in found if moved.figures.get((0, 0, "bends")) else ():
        if key in store.index and key.what not in ("input", "output"):
            found[key] = max(found[key], math.sqrt(FLIPS / max(1, store.index[key][1].numel())) / 10)
    return found
