"""Checks of the arguments of `initialize`, before any is changed: all problems at once."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sized
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from ..amp.precision import find_kept_problems, find_overflow, tensors_to_cast
from ..amp.recipe import Recipe, trainable_dtypes
from ..amp.stepper import is_stepped
from ..data.sharding import loader_in
from ..errors import counted, shorten
from ..parallel.comm import is_simulated, same_on_ranks
from ..parallel.mesh import ParallelContext
from ..utils.optimizer_state import kinds_of, parts_of, plain_settings
from ..utils.param_shard import foreign_params
from ..utils.tensors import dtype_name, is_compound, tensors_of
from ..utils.torch_private import call_hooks, is_compiled
from .deferred import recorded
from .guards import same_trained

if TYPE_CHECKING:
    from ..config import Config


_REDUCES = re.compile(r"[\w.]*\b(reduce_scatter\w*\(|all_reduce\w*\([^,()]*grad(?!\w*norm))")
"""Calls by which an optimizer reduces gradients. (Sums of numbers and norms, and gathers of weights, may stay.)"""
_NEEDS_CLOSURE = re.compile(r"assert closure\b|if (closure is None|not closure):\s*raise\b")


def find_problems(model: Any, optimizer: Any, criterion: Any, recipe: Recipe, device: torch.device) -> Iterator[str]:
    """Problems of model, optimizer and criterion under this recipe on `device`."""
    yield from find_model_problems(model, recipe, device)
    if isinstance(model, nn.Module):
        yield from find_optimizer_problems(optimizer, model)
        yield from find_kept_problems(model, recipe)
    if isinstance(criterion, type) and issubclass(criterion, nn.Module):
        yield f"criterion: the class {criterion.__name__} was given, not a criterion; write {criterion.__name__}()"
    if criterion is not None and not callable(criterion):
        yield f"criterion: expected a callable (outputs, targets) -> loss, but got {_kind(criterion)}"


def find_model_problems(model: Any, recipe: Recipe, device: torch.device) -> Iterator[str]:
    """Problems of the model under this recipe on `device`."""
    if not isinstance(model, nn.Module):
        yield f"model: expected a torch.nn.Module (or a callable that returns one), but got {_kind(model)}"
        return
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        yield f"model: pass model.module, not {type(model).__name__}: the engine averages gradients itself"
        return
    owners = [*model.modules(), *(getattr(hook, "__self__", None) for hook in call_hooks(model))]
    if any(getattr(owner, "is_divided_by_engine", False) is True for owner in owners):
        yield (
            "model: another engine sharded it, and it stays so after close; build the model again, and load into it "
            "what full_state_dict() of that engine returned"
        )
        return
    params = dict(model.named_parameters())
    if complex_params := [name for name, p in params.items() if p.is_complex()]:
        yield f"model: {shorten(complex_params)} are complex; keep each as a real parameter (torch.view_as_real)"
    compound = {name: tensor for name, tensor in chain(params.items(), model.named_buffers()) if is_compound(tensor)}
    compound |= {name: p for name, p in params.items() if hasattr(p.data, "__tensor_flatten__")}
    if compound:
        kind = type(next(iter(compound.values())).data).__name__
        yield (
            f"model: {shorten(list(compound))} are {kind}s, already quantized or sharded, which the engine can neither "
            "cast nor save; pass the model as it was before quantize_ (that part frozen), fully_shard or "
            "parallelize_module: the config says how to shard it"
        )
        return
    on_meta = [name for name, p in params.items() if p.is_meta and recorded(p) is None]
    if on_meta:
        yield (
            f"model: {shorten(on_meta)} are on the meta device, without values; build the model on a real device, or "
            "under halfmesh.deferred_init(), without torch.device('meta')"
        )
    if recipe.cast_lists == "apex" and any(is_compiled(module) for module in model.modules()):
        yield (
            "model: it is compiled, and O1 cannot cast inside compiled code; pass it uncompiled, or use mode='torch' "
            "or opt_level='O2'"
        )
    if recipe.linear is not None:
        yield from recipe.linear.find_problems(model, device)
    for name, tensor in tensors_to_cast(model, recipe):
        problem = find_overflow(name, tensor.detach(), recipe.param_dtype)
        if problem is not None:
            yield f"model: {problem}"
    yield from _find_dtype_problems(params, recipe)


def find_optimizer_problems(optimizer: Any, model: Any) -> Iterator[str]:
    """Problems of the optimizer with this model."""
    if not isinstance(optimizer, optim.Optimizer):
        yield (
            "optimizer: expected a torch.optim.Optimizer over model.parameters(), a list of several, or a callable "
            f"`params -> Optimizer`, but got {_kind(optimizer)}"
        )
        return
    held = Counter[nn.Parameter]()
    for part in parts_of(optimizer):
        yield from _find_part_problems(part, model)
        held.update({p for group in part.param_groups for p in group["params"]})
    names = {param: name for name, param in model.named_parameters()}
    if shared := [names.get(param, "a parameter") for param, count in held.items() if count > 1]:
        yield f"optimizer: several optimizers would step {shorten(shared)}; give each parameter to one"


def _find_part_problems(optimizer: optim.Optimizer, model: nn.Module) -> Iterator[str]:
    """Problems of one of the optimizers."""
    try:
        optimizer.register_load_state_dict_post_hook(lambda _: None).remove()
    except AttributeError:
        yield (
            f"optimizer: {type(optimizer).__name__} does not call torch.optim.Optimizer.__init__, so halfmesh can "
            "neither keep masters for it nor save it; if it wraps another optimizer, pass the inner one"
        )
        return
    name, code = type(optimizer).__name__, list(_code_of(type(optimizer)))
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if (closure is not None and closure.default is closure.empty) or any(map(_NEEDS_CLOSURE.match, code)):
        yield (
            f"optimizer: {name}.step needs a closure, to compute the loss several times per update, but the engine "
            f"steps once, after backward. Use SGD, Adam or AdamW, or train with {name} without an engine"
        )
    on_several = dist.is_initialized() and dist.get_world_size() > 1  # alone it has nothing to reduce
    is_torchs = type(optimizer).__module__.startswith("torch.distributed")
    if is_torchs or (on_several and any(map(_REDUCES.match, code))):
        yield (
            f"optimizer: {name} reduces gradients or weights over ranks itself, which halfmesh already does; pass the "
            "optimizer for one process (Muon, not DistMuon). parallel.data='zero1' shards its state over the ranks"
        )
    if is_stepped(getattr(optimizer, "optimizer", optimizer)):  # convert_to_amp's optimizer has the given one
        yield "optimizer: another engine or convert_to_amp uses it; close() that first, or build a new optimizer"
        return
    foreign = foreign_params(optimizer, model.parameters())
    if foreign:
        yield (
            f"optimizer: it holds {counted(len(foreign), 'parameter')} that the model does not have: "
            f"{shorten(list(foreign))}; build it from model.parameters(), or pass a callable `params -> Optimizer`"
        )


def _code_of(kind: type) -> Iterator[str]:
    """The calls and conditions in an optimizer's class and in its bases that are not torch's, as far as known."""
    for base in kind.__mro__:
        if not base.__module__.startswith(("torch.optim", "builtins")):
            with suppress(OSError, TypeError, SyntaxError):  # written in an interpreter, or in C
                for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
                    if isinstance(node, (ast.Call, ast.Assert, ast.If)):
                        yield ast.unparse(node)


def find_other_problems(
    dataloader: Any, eval_dataloader: Any, lr_scheduler: Any, optimizer: Any, config: Config
) -> Iterator[str]:
    """Problems of the other arguments."""
    for name, loader in (("dataloader", dataloader), ("eval_dataloader", eval_dataloader)):
        if loader is None:
            continue
        loader = loader_in(loader)
        if not isinstance(loader, DataLoader):
            yield (
                f"{name}: expected a torch.utils.data.DataLoader, but got {_kind(loader)}; for a dataset, write "
                "halfmesh.get_dataloader(dataset, batch_size=...); if it wraps a DataLoader, pass the inner one"
            )
        elif _goes_on(loader):
            yield (
                f"{name}: {type(loader).__name__} keeps one iterator over all epochs, which can be neither sharded nor "
                "resumed; pass a DataLoader with persistent_workers=True (timm: use_multi_epochs_loader=False)"
            )
    if lr_scheduler is None:
        return
    schedulers = lr_scheduler if isinstance(lr_scheduler, list) else [lr_scheduler]
    given = (*parts_of(optimizer), optimizer) if isinstance(optimizer, optim.Optimizer) else (optimizer,)
    if any(getattr(scheduler, "optimizer", optimizer) not in given for scheduler in schedulers):
        yield "lr_scheduler: it was built on another optimizer; build it on the optimizer you pass to initialize"
    if any(isinstance(s, optim.lr_scheduler.ReduceLROnPlateau) for s in schedulers) and config.lr_interval != "manual":
        yield (
            "lr_scheduler: ReduceLROnPlateau.step needs a metric, which the engine does not have; set "
            "lr_interval='manual' and call engine.lr_scheduler.step(metric) yourself"
        )
    if config.lr_interval == "epoch" and dataloader is None:
        yield (
            "lr_scheduler: lr_interval='epoch' advances it when engine.dataloader ends, but no dataloader was given "
            "to initialize; pass one, or set lr_interval='manual'"
        )


def overflow_check(model: nn.Module, recipe: Recipe) -> Callable[[str, torch.Tensor], str | None]:
    """A function (name, value) that returns the problem if the recipe casts the tensor `name` to a dtype that cannot
    hold the value."""
    cast = {name for name, _ in tensors_to_cast(model, recipe)}
    return lambda name, value: find_overflow(name, value, recipe.param_dtype) if name in cast else None


def find_device_problem(device: torch.device, recipe: Recipe) -> str | None:
    """The reason why this device cannot train in the recipe's dtype."""
    if device.type != "cuda" or recipe.compute_dtype != torch.bfloat16 or torch.cuda.is_bf16_supported(False):
        return None
    return (
        f"device {device}: it has no bfloat16 matrix products (compute capability below 8.0), and torch would emulate "
        "them slowly; use fp16"
    )


def _find_dtype_problems(params: dict[str, nn.Parameter], recipe: Recipe) -> Iterator[str]:
    names = [name for name, p in params.items() if p.requires_grad or not recipe.autocast]  # which casts a frozen base
    allowed, found = trainable_dtypes(recipe), [n for n in names if params[n].dtype.is_floating_point]
    if odd := [name for name in found if params[name].dtype not in allowed]:
        dtypes = " or ".join(sorted(map(dtype_name, allowed)))
        yield (
            f"model: {counted(len(odd), 'parameter')} in {dtype_name(params[odd[0]].dtype)} ({shorten(odd)}), but they "
            f"must be in {dtypes}: without fp32 masters, small updates are lost; build the model in {dtypes}, or set "
            "mode='naive' of their precision"
        )


def _goes_on(loader: DataLoader[Any]) -> bool:
    """Return True if a loader overrides `__iter__`, and its sampler has no end."""
    if type(loader).__iter__ is DataLoader.__iter__:
        return False
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return not (isinstance(loader.dataset, IterableDataset) or isinstance(sampler, Sized))


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"a{'n' * (name[0].lower() in 'aeiou')} {name}"


# -- the start ---------------------------------------------------------------------------------------------------------


def broadcast_initial_state(context: ParallelContext, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Overwrite weights, buffers and optimizer state on all ranks with rank 0's.

    Raises:
        InputError: the ranks hold models or optimizers of different shape; raised on all ranks.
    """
    if context.size == 1 or is_simulated():
        return
    held = [optimizer.state.get(param) for group in optimizer.param_groups for param in group["params"]]
    state = tensors_of(held)
    mine = {
        "the model's parameters": [(n, tuple(p.shape), str(p.dtype)) for n, p in model.named_parameters()],
        "the model's buffers": [(n, tuple(b.shape), str(b.dtype)) for n, b in model.named_buffers()],
        "the optimizer": [kinds_of(optimizer), *map(plain_settings, optimizer.param_groups)],
        "the optimizer's state": [(tuple(t.shape), str(t.dtype)) for t in state],
    }
    differs = (
        "%s must be the same on all ranks, but names, shapes, dtypes or settings on {ranks} differ from rank 0; build "
        "the same model and optimizer on every rank"
    )
    for what, value in mine.items():
        same_on_ranks(value, what=differs % what)
    names, trained = zip(*((name, param.requires_grad) for name, param in model.named_parameters()), strict=True)
    same_trained(names, bytes(trained), None, context.rank_names)
    # state_dict would miss non-persistent buffers, and parameters() alone would miss all buffers.
    for tensor in (*model.parameters(), *model.buffers(), *state):
        if not tensor.is_meta:  # a deferred tensor gets its value later
            context.broadcast(tensor)
