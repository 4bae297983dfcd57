"""Draws docs/assets/inside.svg, the house and the path of a step: `python -m docs_tools.picture`."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

PATH = Path(__file__).resolve().parents[1] / "docs" / "assets" / "inside.svg"

WIDTH, HEIGHT = 880, 640
COLOURS = {"when": "#c7d2fe", "format": "#bbf7d0", "rank": "#fde68a", "shared": "#e5e7eb", "user": "#ffffff"}


def render() -> str:
    """The picture."""
    parts = [
        _text(20, 30, "Who knows what: each room imports only from below", bold=True),
        _box(20, 46, 400, 50, "user", "your loop, or trainer/ with its hooks", "public calls only"),
        _box(
            20,
            112,
            400,
            50,
            "shared",
            "engine.py; assembly.py: initialize()",
            "config/ and compat.py: check everything, then build",
        ),
        _box(20, 178, 400, 56, "when", "loop/    WHEN", "forward, backward, accumulation, schedulers"),
        _box(20, 250, 192, 70, "format", "amp/    WHICH FORMAT", "recipe, casts, masters,", "loss scale, verdict"),
        _box(228, 250, 192, 70, "rank", "parallel/    WHICH RANK", "mesh, tensor, pipeline,", "reducer, zero1, fsdp"),
        _box(20, 336, 400, 50, "shared", "shard.py", "name, local tensor, weight = 1 / ranks that hold a copy"),
        _box(20, 402, 400, 50, "shared", "registry.py, options.py, errors.py, _torch.py", "what all rooms use"),
        _text(20, 480, "amp and parallel do not import each other: parallel makes gradients", small=True),
        _text(20, 498, "complete, amp turns them into weights, loop calls them in order.", small=True),
        _text(470, 30, "The path of a step, for every mode and layout", bold=True),
    ]
    y = 46
    height = 50
    for room, title, words in STEPS:
        parts.append(_box(470, y, 390, height, room, title, words))
        if y > 46:
            parts.append(_arrow(665, y - 14, y))
        y += height + 14
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" role="img">\n<title>The rooms of halfmesh, and the path of a step</title>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fafafa"/>\n{body}\n</svg>\n'
    )


STEPS = (
    ("user", "engine(x), engine.criterion(...)", "in the mode's precision; under a pipeline a handle"),
    ("format", "engine.backward(loss)", "seeded with loss scale / (microbatches x cycle)"),
    (
        "rank",
        "complete gradients (last batch of a cycle)",
        "mean over dp while backward runs; partial and tied ones are summed",
    ),
    ("format", "measure: [sum of w |g|^p, not finite]", "in fp32, w = 1 / copies"),
    ("rank", "agree: one all-reduce of these two numbers", "the same norm and verdict on all ranks"),
    ("format", "divide: loss scale, cycle and clipping at once", "one number for the fused optimizer"),
    ("user", "your optimizer steps, or the step is skipped", "on all ranks the same"),
    ("format", "publish: fp32 masters, rounded into the model", "zero1 gathers, fsdp keeps parts"),
    ("format", "move the loss scale, on the device", "after the step, never before"),
)


def _box(x: int, y: int, width: int, height: int, room: str, title: str, *lines: str) -> str:
    words = [_text(x + 12, y + 20, title, bold=True)]
    words += [_text(x + 12, y + 37 + 16 * i, line, small=True) for i, line in enumerate(lines)]
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{COLOURS[room]}" stroke="#6b7280"/>\n'
        + "\n".join(words)
    )


def _text(x: int, y: int, words: str, bold: bool = False, small: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{12 if small else 14}"{weight} fill="#111827">{escape(words)}</text>'


def _arrow(x: int, top: int, bottom: int) -> str:
    return f'<path d="M{x} {top} V{bottom - 4} m-4 -4 l4 5 l4 -5" fill="none" stroke="#374151" stroke-width="1.5"/>'


def main() -> None:
    """Write the file."""
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(render())


if __name__ == "__main__":
    main()
