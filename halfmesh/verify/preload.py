"""Imported by the fork server before it forks ranks: imports what all of them need, and what the variable names."""

import contextlib
import faulthandler
import importlib
import os

MODULES = "HALFMESH_PRELOAD"  # seconds that it may take, then names of modules
_OURS = (
    "torch.distributed.fsdp torch.distributed.tensor.parallel torch.distributed.pipelining halfmesh.assembly "
    "halfmesh.config.load halfmesh.parallel.tensor.apply halfmesh.parallel.sharding.fsdp halfmesh.checkpoint.state "
    "halfmesh.loop.pipeline_executor halfmesh.verify.ranks"
)

if MODULES in os.environ:
    _limit, *_names = os.environ[MODULES].split()
    os.dup2(2, 1)  # what modules print is no part of an answer
    faulthandler.dump_traceback_later(float(_limit), exit=True)
    for _name in (*_OURS.split(), *_names):
        with contextlib.suppress(BaseException):  # it fails again in the ranks, which can say so
            importlib.import_module(_name)
    faulthandler.cancel_dump_traceback_later()
