"""Writes docs/promises.md from the marks on tests: `python -m docs_tools.promises`, or `make promises`.

    @pytest.mark.promise("what a library offers", "what halfmesh does", of="PyTorch", page="loop.md")

stands once for each promise, on the test that would fail if it were not true. Another test that proves a part of it has
`@pytest.mark.promise("what a library offers")` only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "promises.md"
SOURCES = {
    "Colossal-AI": "## From Colossal-AI",
    "SageMaker": "## From SageMaker",
    "PyTorch": "## From PyTorch's guide",
}
HEAD = """\
# What is promised, and what proves it

Each row names something that Colossal-AI's tutorial on mixed precision, Amazon SageMaker's model-parallel library or
PyTorch's guide to mixed precision offers or rules out (*lifted* here), and tests in `tests/` that prove it.
`make promises` writes this page from marks on those tests.
"""


@dataclass
class Promise:
    """A row of the page.

    Attributes:
        what: what a library offers.
        here: what halfmesh does.
        of: one of `SOURCES`.
        page: the page that describes it, from docs/.
        tests: what proves it, "path::name"; the first has the whole mark.
    """

    what: str
    here: str = ""
    of: str = ""
    page: str = ""
    tests: list[str] = field(default_factory=list)


def read_promises(tests: Path = ROOT / "tests") -> list[Promise]:
    """The promises of all tests, by source and page.

    Raises:
        ValueError: a mark is incomplete, or two tests have the whole mark of one promise.
    """
    found: dict[str, Promise] = {}
    for path in sorted(tests.rglob("test_*.py")):
        for name, given in _marks(path):
            promise = found.setdefault(given.what, Promise(given.what))
            test = f"{path.relative_to(tests.parent).as_posix()}::{name}"
            if not given.here:
                promise.tests.append(test)
                continue
            if promise.here:
                raise ValueError(f"{test} and {promise.tests[0]} both have the whole mark of {given.what!r}")
            promise.here, promise.of, promise.page = given.here, given.of, given.page
            promise.tests.insert(0, test)
    for promise in found.values():
        if promise.of not in SOURCES or not promise.here or not promise.page:
            raise ValueError(f"no test has the whole mark of {promise.what!r} (what, here, of, page): {promise.tests}")
    order = list(SOURCES)
    return sorted(found.values(), key=lambda promise: (order.index(promise.of), promise.page, promise.what))


def _marks(path: Path) -> Iterator[tuple[str, Promise]]:
    """The names of the tests in a file that have the mark, and what it says."""
    for node in (each for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef)):
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                given = [ast.literal_eval(value) for value in mark.args]
                yield node.name, Promise(*given, **{str(key.arg): ast.literal_eval(key.value) for key in mark.keywords})


def render() -> str:
    """The page."""
    promises = read_promises()
    lines = [HEAD]
    for source, heading in SOURCES.items():
        lines += [heading, "", "| what | here | proven by |", "|---|---|---|"]
        for promise in promises:
            if promise.of == source:
                tests = ", ".join(f"`{test.removeprefix('tests/')}`" for test in promise.tests)
                lines.append(f"| [{promise.what}]({promise.page}) | {promise.here} | {tests} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
