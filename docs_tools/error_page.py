"""Writes docs/errors.md, the list of all messages, from the source: `python -m docs_tools.error_page`."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from .messages import PACKAGE, Message, find_messages

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"

SUBJECTS = {
    "Config": "config/ options.py compat.py key_checks.py registry.py",
    "What initialize is given": "inputs.py assembly.py conversion.py stage_checks.py",
    "The loop": "engine.py loop/accumulation.py loop/parts.py",
    "Data": "data/",
    "Schedulers": "loop/lr.py",
    "Precision": "amp/",
    "Inf and nan": "debug/",
    "Tensor parallelism": "parallel/tensor parallel/style.py parallel/layer_plans.py parallel/attention.py "
    "parallel/gradients.py parallel/sequence parallel/same_calls.py parallel/split.py",
    "Pipeline parallelism": "parallel/pipeline/ loop/pipeline_executor.py loop/handles.py loop/last_stage.py division",
    "Data parallelism, zero1 and fsdp": "parallel/sharding/ parallel/reducer.py parallel/buckets.py "
    "parallel/elementwise.py",
    "Memory and compile": "activation.py parallel/recompute.py parallel/offload.py compilation.py memory.py",
    "Deferred models": "deferred/",
    "Checkpoints": "checkpoint/",
    "Ranks: launch, layout, failures": "launching/ debug/sync_check.py debug/common_state.py parallel/",
    "Trainer and hooks": "trainer/ hooks/",
    "Planning and the command line": "plan/ cli/",
}
"""Headings, with how the modules under them begin: of several the first one that fits."""

OTHERS = "Others"

IN_CONFIGS = ("config/", "options.py", "amp/apex_amp.py", "amp/naive_amp.py")
"""Where a ValueError becomes a line of a ConfigError."""

PUBLIC = {"HandleError": "InputError", "UnknownModelError": "InputError", "BadParameter": "exit status 2:"}
"""Exceptions that are not public, by what they are."""

LEAST_LINE_WORDS = 5
"""Words of a line within a longer message that is listed by itself."""


def render() -> str:
    """The page."""
    messages = [message for message in find_messages() if message.kind != "info"]
    parts = [_INTRODUCTION, *_classes(), "## All messages", _HOW_TO_READ]
    for subject in (*SUBJECTS, OTHERS):
        parts += _section(subject, [message for message in messages if _subject(message.module) == subject])
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """# Errors

<!-- Written by `python -m docs_tools.error_page` from the source; a test compares the two. -->

Everything that halfmesh refuses, it refuses with the value that was given, the reason, and what to change. This page
lists all of it, by subject: search it for a few words of what you were told."""

_HOW_TO_READ = """`{...}` stands for what is known only then, `[...]` for a part that is there or not, `|` for one or
the other. The name before a message is the exception, or *warning* for a line in the log. Lines without one are parts
of longer messages: problems that are listed together, or their beginnings and ends. Above them stands the module that
says them."""


def _classes() -> Iterator[str]:
    """The exceptions, with when they are raised and what to do."""
    yield "## Exceptions"
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
            yield f"### {node.name}\n\n*Derived from {bases}.*\n\n{_prose(ast.get_docstring(node) or '')}"


def _prose(docstring: str) -> str:
    """A docstring as Markdown: its attributes become a list."""
    text, _, attributes = inspect.cleandoc(docstring).partition("Attributes:\n")
    lines = [f"- `{name.strip()}`: {what.strip()}" for name, _, what in _entries(attributes)]
    return "\n\n".join(part for part in (text.strip(), "\n".join(lines)) if part)


def _entries(attributes: str) -> Iterator[tuple[str, str, str]]:
    for line in textwrap.dedent(attributes).splitlines():
        if line.strip():
            yield line.partition(":")


def _section(subject: str, messages: Iterable[Message]) -> Iterator[str]:
    by_module: dict[str, list[Message]] = {}
    for message in messages:
        is_long = len(message.text.split()) >= LEAST_LINE_WORDS or re.match(r"\w+: ", message.text)
        if message.kind or is_long:
            by_module.setdefault(message.module, []).append(message)
    if not by_module:
        return
    yield f"### {subject}"
    for module, said in by_module.items():
        yield f"`halfmesh/{module}`"
        yield "\n".join(f"- {_label(message)}{_code(message.text)}" for message in said)


def _label(message: Message) -> str:
    kind = message.kind
    if kind in ("", "warning"):
        return "*warning* " if kind else ""
    if kind in ("ValueError", "MarkedYAMLError", "UnwritableError") and message.module.startswith(IN_CONFIGS):
        return "ConfigError "
    return f"{PUBLIC.get(kind, kind)} "


def _code(text: str) -> str:
    """As code, which Markdown leaves alone."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _subject(module: str) -> str:
    fitting = (subject for subject, starts in SUBJECTS.items() if module.startswith(tuple(starts.split())))
    return next(fitting, OTHERS)


def main() -> None:
    """Write the page."""
    PAGE.write_text(render())


if __name__ == "__main__":
    main()
