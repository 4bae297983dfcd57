"""`halfmesh verify --script`: the user's own script, unchanged, as layout and as reference.

It runs on the ranks of the layout, where what each data rank uses is kept; in one process, which gets that of all data
ranks together in place of its own; and on the ranks again, with what was kept. So neither seeds nor batches that depend
on the number of ranks make a difference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import Config
from ..distributed.rank_process import RankError
from ..errors import InputError, own_frames
from . import layout
from .phases import Options, RefusedError, Work, prove
from .report import Phase, VerifyReport
from .run import Case
from .script_run import Script


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


class ScriptWork(Work):
    """A layout and a script."""

    is_script = True

    def survey(self, case: Case) -> tuple[Case, int, list[str]]:
        """See `Work`."""
        ranks, name, notes = self.setup.dims.world_size, self.given.path.name, list[str]()
        case.start.mkdir()
        self.options.progress(f"{name}: its batches on {ranks} ranks")
        try:
            known = self._run(ranks, self.given.survey, (case,))
        except RankError as error:
            if not re.search("double|float64", error.reason, re.IGNORECASE):
                raise self._failed(error) from None
            notes.append(f"{name} has dtypes of its own, so float32 in place of float64: {error.reason}")
            case = replace(case, dtype=None)
            known = self._run(ranks, self.given.survey, (case,))
        config = known[0][0]
        batch_norms = tuple(dict.fromkeys(name for _, names in known for name in names))
        return replace(case, config=config, batch_norms=batch_norms), config.gradient_accumulation, notes

    def first_phase(self, folder: Path, case: Case, calls: int) -> tuple[Phase, int]:
        """See `Work`. In float32 where the script has dtypes of its own; accumulated, where one process cannot take the
        whole batch."""
        notes: list[str] = []
        try:
            phase = self._structure(folder, case, calls)
        except InputError as error:
            if calls >= case.chunks:
                raise
            why = str(getattr(error.__context__, "reason", error))
            notes.append(f"compared with one process that accumulates, since it cannot take the whole batch: {why}")
            calls = case.chunks
            phase = self._structure(folder, case, calls)
        notes += [file.read_text() for file in sorted(case.start.glob("*.note"))]
        return replace(phase, notes=(*notes, *phase.notes)), calls

    def _structure(self, folder: Path, case: Case, calls: int) -> Phase:
        if case.dtype is not None:
            return self.structure(folder, case, calls)
        case = replace(case, config=layout.structure(case.config))
        return replace(self.format(folder, case, calls), name="structure")

    def _failed(self, error: RankError) -> Exception:
        if error.refusal:
            return RefusedError(error.refusal)
        return InputError(f"{self.given.path}, rank {error.rank} of the layout: {own_frames(error.text)}")
