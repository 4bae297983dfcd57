"""The cells of the table in docs/models.md: a model in a layout, as a user would train it. Writes the table:
python -m tests.models_table.page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .zoo import SUBJECTS, Subject

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN = "<!-- Written by `python -m tests.models_table.page`; a test compares the two. -->\n\n"
END = "\n<!-- end of what is written -->\n"


@dataclass(frozen=True)
class Layout:
    """A column."""

    words: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    strategy: str = "replicate"

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline

    def config(self, subject: Subject) -> dict[str, Any]:
        parallel: dict[str, Any] = {"data": self.strategy, "tensor": self.tensor}
        if self.pipeline > 1:
            partition = {"partition": subject.points} if subject.points else {}
            parallel["pipeline"] = {"size": self.pipeline, "microbatches": 2, **partition}
        return {"parallel": parallel}


LAYOUTS = {
    "one": Layout("one process"),
    "data": Layout("data 2", data=2),
    "zero1": Layout("zero1 2", data=2, strategy="zero1"),
    "fsdp": Layout("fsdp 2", data=2, strategy="fsdp"),
    "tensor": Layout("tensor 2", tensor=2),
    "pipeline": Layout("pipeline 2", pipeline=2),
    "fsdp x tensor": Layout("fsdp 2 x tensor 2", data=2, tensor=2, strategy="fsdp"),
    "all": Layout("zero1 2 x tensor 2 x pipeline 2", data=2, tensor=2, pipeline=2, strategy="zero1"),
}


@dataclass(frozen=True)
class Cell:
    model: str
    layout: str
    mode: str = "none"

    @property
    def rejection(self) -> str | None:
        """What the message says that it is rejected with; None where it trains."""
        rejected, layout = SUBJECTS[self.model].rejected, LAYOUTS[self.layout]
        return next((words for axis, words in rejected.items() if getattr(layout, axis) > 1), None)

    def __str__(self) -> str:
        return f"{self.model}, {self.layout}, {self.mode}"


def build(name: str, with_criterion: bool) -> Any:
    """What `halfmesh verify` is given: a model as its users call it; most compute their own loss."""
    subject = SUBJECTS[name]
    batch = subject.data()
    if not with_criterion:
        return subject.build(), batch
    labels = batch.pop("labels")
    return subject.build(), (batch.get("x", batch), labels), subject.criterion


def all_cells() -> Iterator[Cell]:
    """Each model in each layout in fp32, and some in half precision."""
    yield from (Cell(model, layout) for model in SUBJECTS for layout in LAYOUTS)
    for model, subject in SUBJECTS.items():
        if subject.half is not None:
            yield Cell(model, subject.half[1], subject.half[0])


def render() -> str:
    """What stands between the two comments."""
    lines = [
        f"| model | {' | '.join(layout.words for layout in LAYOUTS.values())} |",
        "|---" * (len(LAYOUTS) + 1) + "|",
    ]
    for model in SUBJECTS:
        cells = [_say(Cell(model, layout)) for layout in LAYOUTS]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _say(cell: Cell) -> str:
    if cell.rejection is not None:
        return "**rejected**"
    cut = next(layout for layout in LAYOUTS if LAYOUTS[layout].pipeline > 1)  # said once, the others have the same
    points = SUBJECTS[cell.model].points if cell.layout == cut else ()
    return f"yes, cut at `{points[0]}`" if points else "yes"


def main() -> None:
    """Write the page again."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + render() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
