"""Imported by the fork server before it forks ranks: imports what all of them need, and what the variable names."""

import ast
import contextlib
import faulthandler
import importlib
import inspect
import os

MODULES = "HALFMESH_PRELOAD"  # seconds that it may take, then names of modules
_OURS = (
    "torch.distributed.fsdp torch.distributed.tensor.parallel torch.distributed.pipelining halfmesh.engine.initialize "
    "halfmesh.config.load halfmesh.parallel.tensor.apply halfmesh.parallel.sharding.fsdp halfmesh.checkpoint.state "
    "halfmesh.engine.pipeline_executor halfmesh.verify.ranks"
)


def _load(reference: str) -> None:
    """Import a module; of "module:function" what that function imports, too: it would do so in each rank."""
    name, _, function = reference.partition(":")
    module = importlib.import_module(name)
    if not function:
        return
    found = [node for node in ast.parse(inspect.getsource(module)).body if getattr(node, "name", "") == function]
    for node in [inner for outer in found for inner in ast.walk(outer)]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(ast.unparse(node), {"__name__": name, "__package__": module.__package__})


if MODULES in os.environ:
    _limit, *_names = os.environ[MODULES].split()
    os.dup2(2, 1)  # what modules print is no part of an answer
    faulthandler.dump_traceback_later(float(_limit), exit=True)
    for _name in (*_OURS.split(), *_names):
        with contextlib.suppress(BaseException):  # it fails again in the ranks, which can say so
            _load(_name)
    faulthandler.cancel_dump_traceback_later()
