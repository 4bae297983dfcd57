"""What errors of torch mean where FSDP2 shards the model."""

from __future__ import annotations

from traceback import walk_tb

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...errors import InputError


def refuse_given_up(error: RuntimeError) -> None:
    """Raise InputError in place of an `error` of a backward that met weights which FSDP2 has given up."""
    if _met_freed_storage(error):
        raise InputError(
            "backward needs weights that FSDP2 has given up, which it gathers where it sees the gradient of a block's "
            "output. Either a module returns tensors within an object that it cannot look into: return tensors, "
            "tuples, lists or dicts (dataclasses since torch 2.13). Or gradients of gradients were asked for "
            "(torch.autograd.grad with create_graph=True), which weights in parts do not give: use data='zero1'"
        ) from error


def _met_freed_storage(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that the memory of a tensor was given up."""
    seen: BaseException | None = error
    while seen is not None:
        if "are out of bounds for storage of size 0" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def note_unit(error: RuntimeError, model: nn.Module) -> None:
    """Say in an `error` of a rank that has waited too long which unit it was in."""
    names = {module: name or "the model" for name, module in model.named_modules()}
    held = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    units = [names[module] for module in held if isinstance(module, FSDPModule) and module in names]
    where = f"called {units[-1]!r}" if units else "was in a backward"
    error.add_note(
        f"this rank {where}, for which all data ranks gather weights together (data='fsdp'); a block that some ranks "
        "do not call in a batch makes the others wait: call it on all of them, or use data='zero1'"
    )
