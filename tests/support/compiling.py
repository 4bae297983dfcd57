"""A backend of torch.compile that generates no code, and tells what was compiled and that it ran."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.compilers import nop

NAME = "halfmesh_test"
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class Compiled:
    """How many forward graphs were compiled, how often one ran, and the dtypes of the matrix products in them."""

    def __init__(self):
        self.graphs = self.forwards = self.backwards = 0
        self.dtypes = set()

    @property
    def breaks(self):
        """Why torch ended a graph and began another: its words."""
        return list(counters["graph_break"])


_now = Compiled()


@contextmanager
def watched():
    """Nothing is compiled when it begins, and nothing stays compiled. The backend NAME is known within."""
    global _now
    torch.compiler.reset()
    counters.clear()
    _now = Compiled()
    try:
        yield _now
    finally:
        torch.compiler.reset()


def _counting(what):
    def compile_graph(graph, example_inputs):
        for node in graph.graph.nodes:
            if node.target in PRODUCTS:
                _now.dtypes |= {arg.meta["val"].dtype for arg in node.all_input_nodes}
        run = nop(graph, example_inputs)

        def count(args):
            setattr(_now, what, getattr(_now, what) + 1)
            return run(args)

        count._boxed_call = True
        return count

    return compile_graph


_traced = aot_autograd(fw_compiler=_counting("forwards"), bw_compiler=_counting("backwards"))


@register_backend(name=NAME)
def _backend(graph, example_inputs, **_):
    _now.graphs += 1
    return _traced(graph, example_inputs)
