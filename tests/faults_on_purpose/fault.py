"""What a fault is, and how it is put into a process that runs: the code of a function is replaced."""

from __future__ import annotations

import gc
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tests.composition.cells import Cell, Pipe

from .workloads import Given

NOT_THERE = "a function that a fault changes is not there"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Text:
    """A change within a function of halfmesh/: `old`, which stands in `file` once, becomes `new`; in it OLD stands for
    `old`."""

    file: str
    old: str
    new: str

    @property
    def path(self) -> Path:
        return ROOT / "halfmesh" / self.file

    @property
    def module(self) -> str:
        return "halfmesh." + self.file.removesuffix(".py").replace("/", ".")


@dataclass(frozen=True)
class In:
    """A layout in which verify has to see a fault.

    Attributes:
        right: patterns of what may be said first, "kind name; sentence"; or "rejected text", where the engine itself
            finds it.
        build: makes the model, inputs and criterion; None: those of the cell's workload.
        more: keys of the config.
        cause: words of the likely cause, or of what to try.
        unseen: why nothing is said of it.
    """

    cell: Cell
    right: str | tuple[str, ...]
    build: Callable[[], Given] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    cause: str = ""
    unseen: str = ""

    def config(self) -> dict[str, Any]:
        return self.cell.config() | dict(self.more)

    def is_right(self, said: str) -> bool:
        """Whether a report may say this first."""
        patterns = (self.right,) if isinstance(self.right, str) else self.right
        return any(fnmatchcase(said, pattern) for pattern in patterns)

    def __str__(self) -> str:
        return "-".join([str(self.cell), *self.more])


@dataclass(frozen=True)
class Fault:
    """
    Attributes:
        what: is wrong.
        texts: where halfmesh is changed; () of a user's model, which has it in one process, too.
        tests: each of them has to fail.
        layouts: verify has to see it there.
    """

    what: str
    texts: tuple[Text, ...]
    tests: tuple[str, ...]
    layouts: tuple[In, ...]

    @staticmethod
    def of(what: str, given: Sequence[Any]) -> Fault:
        """Of changes of halfmesh, or of a builder; and of what sees it."""
        texts, tests, layouts = (tuple(each for each in given if isinstance(each, kind)) for kind in (Text, str, In))
        return Fault(what, texts, tests, layouts)


def changed(texts: Sequence[Text]) -> Iterator[tuple[CodeType, CodeType]]:
    """The code of each function that they change (the outermost of nested ones), before and after."""
    for file in dict.fromkeys(text.file for text in texts):
        some = [text for text in texts if text.file == file]
        path, before = inspect.getfile(importlib.import_module(some[0].module)), some[0].path.read_text()
        after = before
        for text in some:
            assert before.count(text.old) == 1, f"{file} has changed: say where the fault would be now: {text.old!r}"
            after = after.replace(text.old, text.new.replace("OLD", text.old))
        codes = (_functions(compile(text, path, "exec", dont_inherit=True)) for text in (before, after))
        pairs = [pair for pair in zip(*codes, strict=True) if _meaning(pair[0]) != _meaning(pair[1])]
        assert pairs, f"{file}: nothing in a function is changed"
        yield from pairs


@contextmanager
def put(texts: Sequence[Text]) -> Iterator[None]:
    """A scope in which this process has a fault."""
    pairs = list(changed(texts))
    places = {(before.co_filename, before.co_qualname, before.co_firstlineno): after for before, after in pairs}
    is_frozen = gc.get_freeze_count() > 0  # in ranks
    gc.unfreeze()
    found = [(each, each.__code__) for each in gc.get_objects() if type(each) is FunctionType]
    found = [(each, code) for each, code in found if _place(code) in places]
    if is_frozen:
        gc.freeze()
    assert {_place(code) for _, code in found} == places.keys(), NOT_THERE
    try:
        for each, code in found:
            each.__code__ = places[_place(code)]
        yield
    finally:
        for each, code in found:
            each.__code__ = code


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _functions(code: CodeType) -> Iterator[CodeType]:
    """The outermost functions of a module, also of its classes, in order."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            if const.co_flags & inspect.CO_OPTIMIZED:
                yield const
            else:
                yield from _functions(const)


def _meaning(code: CodeType) -> tuple[Any, ...]:
    """What `code` does, without the numbers of its lines."""
    consts = [_meaning(const) if isinstance(const, CodeType) else repr(const) for const in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, consts


# -- layouts, and patterns of the places that verify may name ----------------------------------------------------------

PIPE = Pipe(2, "1f1b", 2)


class At:
    """Layouts that faults are put into."""

    LLAMA_TENSOR, GPT_TENSOR = Cell("none", "llama", tensor=2), Cell("none", "gpt", tensor=2)
    MLP_TENSOR, VIT_TENSOR = Cell("none", tensor=2), Cell("none", "vit", tensor=2)
    GPT_SEQUENCE = Cell("none", "gpt", tensor=2, sequence_parallel=True)
    MLP_PIPE, GPT_PIPE = Cell("none", pipeline=PIPE), Cell("none", "gpt", pipeline=PIPE)
    GPT_CONTEXT, LLAMA_CONTEXT = Cell("none", "gpt", context=2), Cell("none", "llama", context=2)
    EXPERTS = Cell("none", "mixtral", data=2, expert=2)
    DATA, TWICE, GPT_DATA = Cell(data=2), Cell(data=2, gradient_accumulation=2), Cell("none", "gpt", data=2)
    ZERO1, FSDP = Cell(data=2, strategy="zero1"), Cell("none", "gpt", data=2, strategy="fsdp")
    TORCH_FP16, NAIVE_FP16, NAIVE_BF16 = (Cell(mode, data=2) for mode in ("torch_fp16", "naive_fp16", "naive_bf16"))
    TORCH_FP16_TENSOR = Cell("torch_fp16", tensor=2)


CLIPPED, WEIGHTED = {"clip_grad_norm": 0.5}, {"loss_reduction": "weighted"}
GRADIENT, LOSS = "gradient *", "loss *"
UNLIKE = "rejected *differ between ranks that should hold the same*"
OTHERWISE = "rejected *compute something else*"


def after(name: str) -> str:
    """The output of a module whose inputs agree."""
    return f"output {name}; *its inputs agree*"


def before(name: str) -> str:
    """The caller's own code before a module, whose input differs."""
    return f"output *; * {name}, whose input*"


def grad(name: str) -> str:
    """The gradient of a module's output, which is made by what was given that."""
    return f"*; *the gradient of the output of {name} differs*"
