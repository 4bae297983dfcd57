"""`halfmesh verify --script`: the user's own script, unchanged, as layout and as reference.

It runs on the ranks of the layout, where what each data rank uses is kept; in one process, which gets that of all data
ranks together in place of its own; and on the ranks again, with what was kept. So neither seeds nor batches that depend
on the number of ranks make a difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..config import Config
from ..distributed.local_ranks import ENGINE, LocalRanks
from ..distributed.rank_process import RankError
from ..engine.engine import Engine
from ..errors import InputError, own_frames
from ..utils.torch_private import BATCH_NORMS
from . import layout
from .compare import Comparison, Coordinates, Measures
from .phases import ACCUMULATED, Options, RefusedError, Work, prove
from .record import Sink, Store
from .report import Phase, VerifyReport
from .run import Case, comparison, perturb
from .script_run import Script, ScriptRun


def verify_script(config: Any, script: str | Path, args: Sequence[str] = (), **options: Any) -> VerifyReport:
    """Prove on this machine that a layout trains what a script trains as one process does.

    Args:
        config: a path, a dict or a Config. It decides precision and layout; its other keys go before the script's.
        script, args: run as they are, in processes of their own, several times. The engine saves nothing in them.
        options: as of `verify`; after `updates` the script is ended.

    Raises:
        ConfigError: the config cannot be loaded.
        InputError: the script fails in the layout, or in one process.
    """
    path, wanted = Path(script), Options(**options)
    if not path.is_file():
        raise InputError(f"{path}: there is no such script")

    def given(settings: Config) -> Script:
        return Script(path, tuple(args), config, tuple(wanted.overrides), settings.to_dict().get("parallel", {}))

    return prove(config, wanted, given, ScriptWork)


# -- in the processes ------------------------------------------------------------------------------------------


def keep(case: Case) -> tuple[Config, list[str]]:
    """The first run. Returns the script's config, without constants, and the names of modules that are BatchNorms."""
    run = ScriptRun(case, "keep")
    run.run()
    kinds = run.engine.model.named_modules()
    (run.config.model_extra or {}).clear()  # which may be anything, and cannot be sent
    return run.config, [name for name, module in kinds if isinstance(module, BATCH_NORMS)]


def record(case: Case, path: Path, calls: int) -> None:
    """Write what the script computes in one process; `calls` of the model for each update."""
    store = Store(path, write=True)
    _reference(case, calls, lambda _: store).run()
    store.close()


def estimate(case: Case, path: Path, calls: int, eps: float, _parts: int = 0) -> Measures:
    """How far the reference in `path` is from one whose first layer's outputs move by up to `eps` of themselves."""

    def sink(engine: Engine) -> Comparison:
        perturb(engine.model, eps)
        return Comparison(Store(path), Coordinates(0, calls, 1, {}), calls)

    measures: Measures = _reference(case, calls, sink).run().measures
    return measures


def compare(case: Case, path: Path, calls: int, accumulated: Path | None = None) -> Measures:
    """Run the script on this rank of the layout, and compare."""
    other = None if accumulated is None else Store(accumulated)
    measures: Measures = ScriptRun(case, "own", partial(comparison, case, Store(path), calls, other)).run().measures
    return measures


def _reference(case: Case, calls: int, sink: Callable[[Engine], Sink]) -> ScriptRun:
    return ScriptRun(case, "whole" if calls < case.chunks else "each", sink, max(1, calls // case.chunks))


# -- the phases ------------------------------------------------------------------------------------------------


class ScriptWork(Work):
    """A layout and a script."""

    _plain = _engine = staticmethod(record)
    _estimate, _rank, _overflows = staticmethod(estimate), staticmethod(compare), False
    _has_group = False

    def phases(self, folder: Path) -> Iterator[Phase]:
        """See `Work`."""
        script: Script = replace(self.given, folder=folder)
        ranks, options = self.setup.dims.world_size, self.options
        case = Case(script, self.setup.config, 0, options.updates, options.device)
        options.progress(f"{script.path.name}: its batches on {ranks} ranks")
        notes: list[str] = []
        try:
            known = self._run(ranks, keep, (case,))
        except RankError as error:
            if not re.search("double|float64", error.reason, re.IGNORECASE):
                raise self._failed(error) from None
            notes.append(f"{script.path.name} has dtypes of its own, so float32 in place of float64: {error.reason}")
            case = replace(case, dtype=None)
            known = self._run(ranks, keep, (case,))
        config = known[0][0]
        mixes = tuple(dict.fromkeys(name for _, names in known for name in names))
        case = replace(case, config=config, chunks=self._chunks(config), mixes=mixes)
        why = self._why_by_itself(case)
        calls = case.chunks * case.microbatches if why else config.gradient_accumulation
        if calls > config.gradient_accumulation:
            notes.append(f"{why}: {ACCUMULATED}")
        try:
            phase = self._first_phase(folder, case, calls)
        except InputError as error:
            if calls >= case.chunks:
                raise
            why = str(getattr(error.__context__, "reason", error))
            notes.append(f"compared with one process that accumulates, since it cannot take the whole batch: {why}")
            calls = case.chunks
            phase = self._first_phase(folder, case, calls)
        notes += [file.read_text() for file in sorted(folder.glob("*.note"))]
        yield replace(phase, notes=(*notes, *phase.notes))
        if phase.equal and (case.dtype or config.precision):
            yield self.format(folder, replace(case, config=layout.gentle(config), dtype=None), calls)

    def _first_phase(self, folder: Path, case: Case, calls: int) -> Phase:
        case = replace(case, config=layout.structure(case.config))
        if case.dtype is not None:
            return self.structure(folder, case, calls)
        return replace(self.format(folder, case, calls), name="structure")

    def _failed(self, error: RankError) -> Exception:
        if error.refusal:
            return RefusedError(error.refusal)
        return InputError(f"{self.given.path}, rank {error.rank} of the layout: {own_frames(error.text)}")

    def _ranks(self, world_size: int) -> LocalRanks:
        return LocalRanks(world_size, self.options.device, (*ENGINE, "halfmesh.verify.script_run"))
