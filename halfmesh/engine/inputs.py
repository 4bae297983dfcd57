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
from ..amp.recipe import HALF, Recipe, trainable_dtypes
from ..amp.stepper import is_stepped
from ..data.sharding import loader_in
from ..errors import InputError, counted, shorten
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


_REDUCES = re.compile(r"\breduce_scatter\w*\(|\ball_reduce\w*\([^,()]*grad(?!\w*norm)")
"""Calls by which an optimizer reduces gradients. (Sums of numbers and norms, and gathers of weights, may stay.)"""
_NEEDS_CLOSURE = re.compile(r"\bassert closure\b|\bif (?:closure is None|not closure):\s*raise\b")


def find_problems(model: Any, optimizer: Any, criterion: Any, recipe: Recipe, device: torch.device) -> Iterator[str]:
    """Problems of model, optimizer and criterion under this recipe on `device`."""
    yield from find_model_problems(model, recipe, device)
    if isinstance(model, nn.Module):
        yield from find_optimizer_problems(optimizer, model, recipe)
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
        wrapper = type(model).__name__
        yield (
            f"model: it is wrapped in {wrapper}; pass the plain model (model.module): the engine averages gradients "
            "itself"
        )
        return
    owners = [*model.modules(), *(getattr(hook, "__self__", None) for hook in call_hooks(model))]
    if any(getattr(owner, "is_divided_by_engine", False) is True for owner in owners):
        yield (
            "model: another engine sharded it, and this rank holds only a part, also after close; build the model "
            "again, and load into it what full_state_dict() of that engine returned"
        )
        return
    params = dict(model.named_parameters())
    if complex_params := [name for name, p in params.items() if p.is_complex()]:
        yield (
            f"model: {shorten(complex_params)} are complex, which is not supported; keep each as a real parameter "
            "(torch.view_as_real)"
        )
    compound = {name: tensor for name, tensor in chain(params.items(), model.named_buffers()) if is_compound(tensor)}
    if compound:
        kind = type(next(iter(compound.values()))).__name__
        yield (
            f"model: {shorten(list(compound))} are quantized weights ({kind}), which the engine can neither cast nor "
            "save; pass the model as it was before quantize_, with that part frozen"
        )
        return
    sharded = [name for name, p in params.items() if hasattr(p.data, "__tensor_flatten__")]
    if sharded:
        yield (
            f"model: {shorten(sharded)} are {type(params[sharded[0]].data).__name__}s: the model is already sharded; "
            "pass it as it was before fully_shard or parallelize_module: the config says how to shard it"
        )
    devices = sorted({str(p.device) for p in params.values() if recorded(p) is None})
    if "meta" in devices:
        on_meta = [name for name, p in params.items() if p.is_meta and recorded(p) is None]
        yield (
            f"model: {shorten(on_meta)} are on the meta device, without values; build the model on a real device, or "
            "under halfmesh.deferred_init(), without torch.device('meta')"
        )
    elif len(devices) > 1:
        yield (
            f"model: its parameters are on several devices ({', '.join(devices)}); load it without device_map, or move "
            "it to one with model.to(device): the config says what each rank holds"
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


def find_optimizer_problems(optimizer: Any, model: Any, recipe: Recipe) -> Iterator[str]:
    """Problems of the optimizer with this model."""
    if not isinstance(optimizer, optim.Optimizer):
        given = _kind(optimizer)
        if isinstance(optimizer, (list, tuple)):
            given = f"a list of [{', '.join(type(one).__name__ for one in optimizer)}]"
        yield (
            "optimizer: expected a torch.optim.Optimizer over model.parameters(), a list of several, or a callable "
            f"`params -> Optimizer`, but got {given}"
        )
        return
    parts = parts_of(optimizer)
    for part in parts:
        yield from _find_part_problems(part, model, recipe)
    names = {param: name for name, param in model.named_parameters()}
    held = Counter(p for part in parts for p in {p: None for group in part.param_groups for p in group["params"]})
    if shared := [names.get(param, "a parameter") for param, count in held.items() if count > 1]:
        yield f"optimizer: several optimizers would step {shorten(shared)}; give each parameter to one"


def _find_part_problems(optimizer: optim.Optimizer, model: nn.Module, recipe: Recipe) -> Iterator[str]:
    """Problems of one of the optimizers."""
    try:
        optimizer.register_load_state_dict_post_hook(lambda _: None).remove()
        parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    except AttributeError:
        yield (
            f"optimizer: {type(optimizer).__name__} does not call torch.optim.Optimizer.__init__, so halfmesh can "
            "neither keep masters for it nor save it. If it wraps another optimizer, pass the inner one, or give it "
            "the inner one's param_groups, and a state_dict() and load_state_dict() with its state, as timm's "
            "Lookahead has"
        )
        return
    name, classes = type(optimizer).__name__, _classes(type(optimizer))
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    steps = [part for body in classes for part in body if isinstance(part, ast.FunctionDef) and part.name == "step"]
    if needed or any(_NEEDS_CLOSURE.search(ast.unparse(step)) for step in steps):
        yield (
            f"optimizer: {name}.step needs {needed[0] if needed else 'closure'!r}, to compute the loss several times "
            "per update, but the engine steps once, after backward. Use one whose step needs no argument (SGD, Adam, "
            f"AdamW), or train with {name} without an engine"
        )
    on_several = dist.is_initialized() and dist.get_world_size() > 1  # alone it has nothing to reduce
    reduces = on_several and any(_REDUCES.search(ast.unparse(part)) for body in classes for part in body)
    if reduces or type(optimizer).__module__.startswith("torch.distributed"):
        yield (
            f"optimizer: {name} reduces gradients or weights over ranks itself, which halfmesh already does. Pass the "
            "optimizer for one process (Muon, not DistMuon); parallel.data='zero1' shards its state over the ranks"
        )
    if is_stepped(getattr(optimizer, "optimizer", optimizer)):  # convert_to_amp's optimizer has the given one
        yield (
            "optimizer: another engine or convert_to_amp is using it; call close() on that first, or build a new "
            "optimizer"
        )
        return
    yield from _find_lost_eps(optimizer, recipe)
    foreign = foreign_params(optimizer, model.parameters())
    if foreign:
        yield (
            f"optimizer: it holds {counted(len(foreign), 'parameter')} that the model does not have: "
            f"{shorten(list(foreign))}; build it from model.parameters() of the model you pass, or pass a callable "
            "`params -> Optimizer`"
        )


class _WithoutText(ast.NodeTransformer):
    """Empties docstrings and other text, where words are no calls."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node


def _classes(kind: type) -> list[list[ast.stmt]]:
    """The bodies of an optimizer's class and of its bases that are not torch's, as far as their code is known."""
    own = [base for base in kind.__mro__ if not base.__module__.startswith(("torch.optim", "builtins"))]
    found = []
    for base in own:
        with suppress(OSError, TypeError, SyntaxError):  # written in an interpreter, or in C; or not a class alone
            tree = _WithoutText().visit(ast.parse(textwrap.dedent(inspect.getsource(base))))
            found += [part.body for part in tree.body if isinstance(part, ast.ClassDef)]
    return found


def _find_lost_eps(optimizer: optim.Optimizer, recipe: Recipe) -> Iterator[str]:
    """Without masters the optimizer computes in half precision, where Adam's 1e-8 is zero and 0 / 0 is nan."""
    if recipe.param_dtype not in HALF or recipe.master_weights:
        return
    smallest = 2.0**-24 if recipe.param_dtype == torch.float16 else 2.0**-133
    for index, group in enumerate(optimizer.param_groups):
        eps = group.get("eps")
        if isinstance(eps, float) and 0 < eps < smallest:
            yield (
                f"optimizer: eps={eps:g} of param_groups[{index}] rounds to zero in {dtype_name(recipe.param_dtype)}, "
                "and the optimizer divides by it where a gradient is zero: weights would become nan; set eps to about "
                "1e-4, or keep fp32 masters (opt_level='O2' or mode='naive')"
            )


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
                "halfmesh.get_dataloader(dataset, batch_size=..., shuffle=True); if it wraps a DataLoader, pass the "
                "inner one"
            )
        elif _goes_on(loader):
            yield (
                f"{name}: {type(loader).__name__} keeps one iterator over all epochs, which can be neither sharded "
                "nor resumed; pass a DataLoader with persistent_workers=True, which also keeps its workers (with "
                "timm's create_loader: use_multi_epochs_loader=False)"
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
    allowed = trainable_dtypes(recipe)
    found = [name for name, p in params.items() if p.dtype not in allowed and p.dtype.is_floating_point]
    odd = [name for name in found if not recipe.autocast or params[name].requires_grad]  # which casts a frozen base
    if not odd:
        return
    dtype = params[odd[0]].dtype
    naive = f", or set {'bf16' if dtype == torch.bfloat16 else 'fp16'} = dict(mode='naive')" if dtype in HALF else ""
    names = " or ".join(sorted(map(dtype_name, allowed)))
    yield (
        f"model: {counted(len(odd), 'parameter')} in {dtype_name(dtype)} ({shorten(odd)}), but they must be in "
        f"{names}: without fp32 masters, small updates are lost; build the model in {names}{naive}"
    )


def _goes_on(loader: DataLoader[Any]) -> bool:
    """Return True if a loader that overrides `__iter__` has an iterator already, or a sampler without an end."""
    if type(loader).__iter__ is DataLoader.__iter__:
        return False
    kept = [value for name, value in vars(loader).items() if name != "_iterator"]
    has_begun = any(isinstance(value, Iterator) and isinstance(value, Sized) for value in kept)  # as torch's have
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return has_begun or not (isinstance(loader.dataset, IterableDataset) or isinstance(sampler, Sized))


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
    sparse = [name for name, buffer in model.named_buffers() if buffer.layout != torch.strided]
    if sparse:
        raise InputError(f"the buffers {shorten(sparse)} are sparse, which several ranks cannot share; make them dense")
    held = [optimizer.state.get(param) for group in optimizer.param_groups for param in group["params"]]
    state = tensors_of(held)
    mine = {
        "the model's parameters": [(n, tuple(p.shape), str(p.dtype)) for n, p in model.named_parameters()],
        "the model's buffers": [(n, tuple(b.shape), str(b.dtype)) for n, b in model.named_buffers()],
        "the optimizer": [kinds_of(optimizer), *map(plain_settings, optimizer.param_groups)],
        "the optimizer's state": [(tuple(t.shape), str(t.dtype)) for t in state],
    }
    for what, value in mine.items():
        same_on_ranks(
            value,
            what=(
                f"{what} must be the same on all ranks, but names, shapes, dtypes or settings on {{ranks}} differ "
                "from rank 0; build the same model and optimizer on every rank"
            ),
        )
    names, trained = zip(*((name, param.requires_grad) for name, param in model.named_parameters()), strict=True)
    same_trained(names, bytes(trained), None, context.rank_names)
    # state_dict would miss non-persistent buffers, and parameters() alone would miss all buffers.
    for tensor in (*model.parameters(), *model.buffers(), *state):
        if not tensor.is_meta:  # a deferred tensor gets its value later
            context.broadcast(tensor)
