"""A backend of torch.compile that generates no code, and tells what was compiled and that it ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.compilers import nop

NAME = "halfmesh_test"
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


@dataclass
class Compiled:
    """
    Attributes:
        graphs: that were compiled, forward ones.
        forwards, backwards: how often one ran.
        dtypes: of the matrix products in them.
    """

    graphs: int = 0
    forwards: int = 0
    backwards: int = 0
    dtypes: set[torch.dtype] = field(default_factory=set)

    @property
    def breaks(self) -> list[str]:
        """Why torch ended a graph and began another: its words."""
        return list(counters["graph_break"])


_now = Compiled()


@contextmanager
def watched() -> Iterator[Compiled]:
    """Nothing is compiled when it begins, and nothing stays compiled. The backend NAME is known within."""
    global _now
    torch.compiler.reset()
    counters.clear()
    _now = Compiled()
    try:
        yield _now
    finally:
        torch.compiler.reset()


def _counting(what: str) -> Callable[..., Any]:
    def compile_graph(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.target in PRODUCTS:
                _now.dtypes |= {arg.meta["val"].dtype for arg in node.all_input_nodes}
        run = nop(graph, example_inputs)

        def count(args: Any) -> Any:
            setattr(_now, what, getattr(_now, what) + 1)
            return run(args)

        count._boxed_call = True  # type: ignore[attr-defined]
        return count

    return compile_graph


_traced = aot_autograd(fw_compiler=_counting("forwards"), bw_compiler=_counting("backwards"))


@register_backend(name=NAME)
def _backend(graph: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    _now.graphs += 1
    return _traced(graph, example_inputs)
