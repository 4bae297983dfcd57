"""Writes docs/composition.md from the composition table and the cells: python -m tests.composition.page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from halfmesh.compat import render_table
from tests.support.models import COMPUTE_DTYPES, TOLERANCES

from .cells import EXPERTS, MODES, MOST_RANKS, covering, few, product
from .parity import MOVEMENT, NORM
from .rejections import messages
from .test_overflow import KINDS
from .workloads import SAMPLES, WORKLOADS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "composition.md"

MODELS = {
    "mlp": "linear layers, sharded by patterns in the config (colwise, rowwise, a gathered head, one left whole) and "
    "cut at split points",
    "gpt": "`examples/gpt.py`: fused qkv, embedding and head tied",
    "vit": "timm's VisionTransformer: norms of q and k, LayerScale",
    "llama": "transformers' LlamaForCausalLM, with its own plan: 8 heads on 4 key-value heads, embedding and head tied",
}
assert MODELS.keys() == WORKLOADS.keys()


def render() -> str:
    """The page."""
    parts = [_INTRODUCTION, render_table().strip(), *_trained(), *_rejected(), *_how_to_run()]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """# What composes with what

<!-- Written by `python -m tests.composition.page`; a test compares the two. -->

Rows are precision modes, columns are ways to use several ranks. *yes*: proven by `tests/composition/`, as
[`halfmesh verify`](verify.md) proves a layout. Every other combination is rejected at start-up, with a message that
says what to use instead."""


def _trained() -> Iterator[str]:
    modes = [mode for mode in MODES if mode in TOLERANCES]
    yield "## What is trained"
    yield _fill(
        f"""The cells of `tests/composition/cells.py` combine mode, model, tensor and context ranks (up to 4 of each),
        data ranks and strategy, pipeline (up to 4 ranks), sequence parallelism, accumulation, clipping and
        `reduce_dtype`. {len(product()):,} are allowed on up to {MOST_RANKS} ranks. `make test` runs {len(few())} of
        them: every value, each mode and each model with each kind of layout, and any two kinds together.
        `make test-all` runs {len({*covering()} - {*few()})} more: every pair of values, each mode with each model on a
        tensor group and on a pipeline, and each mode with pipeline, data and tensor parallelism combined.
        `make test-composition` runs all without a pipeline, and every triple of
        values with one: about 2,000."""
    )
    yield _table(("model", "what is in it"), MODELS.items())
    yield _fill(
        f"""Each cell makes 2 or 3 updates of SGD with momentum and a scheduler, on {SAMPLES} samples each, the same in
        every layout, and is compared tensor by tensor with the same mode in one process. Ranks start with different
        weights, and must take rank 0's. The layouts of the few cells, and of all without a mode, are compared with
        plain torch in float64, within 1e-9, or 1e-7 of the way that a parameter went. In a mode verify allows what
        rounding explains, and the suite not more than these relative differences:"""
    )
    yield _table(("mode", "weights", "distance moved", "gradient norm"), map(_limits, modes))
    yield _list(
        """*weights*: a final weight (or master), relative to the largest weight. *distance moved*: how far a parameter
        ends from its target, relative to how far it had to move, which shows wrong gradients of small weights.
        *gradient norm*: of each update. A `reduce_dtype` below float32 adds its rounding.""",
        """Bitwise equal on all ranks: skips, loss scale, gradient norm and learning rate of each update, and the final
        weights.""",
        """In fp16 the last rank's loss is inf in update 1: all ranks skip, the scale falls, the scheduler waits. Before
        and after, the scale grows (not in apex, which has no key for when).""",
        "Matrix products run in the mode's dtype.",
    )
    yield "Also tested:"
    yield _list(
        f"""an inf in one rank's gradient of one parameter, of each kind ({", ".join(KINDS)}), on the first and
        the last rank that holds it: every rank skips, and nothing changes;""",
        "norms of type 1, 2, 3 and inf, to 1e-9 of those of one process: replicated tensors count once;",
        f"""experts of mixture-of-experts layers (Mixtral) on 2 to 8 ranks: {len(EXPERTS)} cells, each mode in one;""",
        "parameters without gradients: frozen layers, layers that only one data rank uses, layers that nobody uses;",
        """that these comparisons can fail: faults put into the engine on purpose (`tests/faults_on_purpose/`), such as
        a norm that counts replicated tensors twice, are reported with their place.""",
    )


def _rejected() -> Iterator[str]:
    yield "## What is rejected"
    rows = ((", ".join(f"`{where}`" for where in places), message) for message, places in messages().items())
    yield _table(("combination", "message"), rows)


def _how_to_run() -> Iterator[str]:
    yield "## Run it"
    yield """```
make test ROOM=composition    # the few cells; make test-all ROOM=composition: every pair of values, too
make test-composition         # many more: about 40 minutes on two cores
```"""
    yield f"One cell: `.venv/bin/python -m pytest tests/composition -k {covering()[-1]}`"


def _limits(mode: str) -> tuple[str, ...]:
    dtype = COMPUTE_DTYPES[mode]
    limits = (TOLERANCES[mode], MOVEMENT[dtype], NORM[dtype])
    return f"`{mode}`", *(f"{limit:.0e}".replace("e-0", "e-") for limit in limits)


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(" ".join(text.split()), 120, subsequent_indent=indent, break_long_words=False)


def _list(*items: str) -> str:
    return "\n".join(_fill(f"- {item}", indent="  ") for item in items)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(render())
