"""Checks of what is passed to `initialize`, before any of it is changed: every problem at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader, Dataset

from ._torch import call_hooks, has_no_memory, is_compiled
from .amp.cast import find_overflow, tensors_to_cast
from .amp.holdings import foreign_params
from .amp.recipe import HALF, Recipe
from .deferred.adoption import recorded
from .deferred.recording import recording_of
from .engine.dataloader import EMPTY
from .errors import InputError, shorten
from .parallel.tensor_layers import DividedLayer

if TYPE_CHECKING:
    from .config import Config


def find_model_problems(model: Any, recipe: Recipe, mode: str | None) -> Iterator[str]:
    """What is wrong with the model for this recipe."""
    if not isinstance(model, nn.Module):
        yield f"model: a torch.nn.Module (or a callable that returns one) is needed, but {_kind(model)} was given"
        return
    if getattr(model, "is_converted", False) is True:
        yield "model: it comes from convert_to_amp; pass its .module, after close() of the optimizer from there"
        return
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        yield f"model: it is wrapped in {type(model).__name__}; pass the plain model (model.module), halfmesh reduces"
        return
    divided = [name for name, module in model.named_modules() if isinstance(module, DividedLayer)]
    if divided:
        yield (
            f"model: {shorten(divided)} are divided over the tensor group of another engine; close that one first (its "
            "close() makes them whole), or, after an error, build the model again"
        )
        return
    if any(getattr(getattr(hook, "__self__", None), "is_stage_cut", False) for hook in call_hooks(model)):
        yield (
            "model: this rank holds stages of it for another engine; close that one first (its close() makes the model "
            "whole), or, after an error, build the model again"
        )
        return
    params = dict(model.named_parameters())
    lazy = [name for name, p in params.items() if isinstance(p, UninitializedParameter)]
    if lazy:
        yield f"model: {shorten(lazy)} have no shape yet (lazy modules); run one forward before initialize"
        return
    strange = [name for name, p in params.items() if p.is_complex()]
    if strange:
        yield (
            f"model: {shorten(strange)} are complex, for which no precision mode is defined; keep real and imaginary "
            "part as one real parameter (torch.view_as_real)"
        )
    split = [name for name, p in params.items() if type(p.data) is not torch.Tensor and not has_no_memory(p)]
    if split:
        yield (
            f"model: {shorten(split)} are {type(params[split[0]].data).__name__}s: the model was sharded already; "
            "pass it as it was before fully_shard or parallelize_module, the config says how to cut it"
        )
    deferred = [name for name, p in params.items() if recording_of(p) is not None]
    if deferred:
        yield (
            f"model: {shorten(deferred)} were made under halfmesh.deferred_init(), and have no values; pass the model "
            "to initialize, which makes them, or build it as usual"
        )
        return
    if not params:
        yield f"model: {type(model).__name__} has no parameters, so there is nothing to train"
        return
    devices = sorted({str(p.device) for p in params.values() if recorded(p) is None})
    if "meta" in devices:
        on_meta = [name for name, p in params.items() if p.is_meta and recorded(p) is None]
        yield (
            f"model: {shorten(on_meta)} are on the meta device, without values; build the model on a real device, or "
            "under halfmesh.deferred_init(), without torch.device('meta')"
        )
    elif len(devices) > 1:
        yield f"model: its parameters are on several devices ({', '.join(devices)}); move it to one: model.to(device)"
    if recipe.cast_lists == "apex" and any(is_compiled(module) for module in model.modules()):
        yield (
            "model: it is compiled, and O1's casts do not reach into compiled code; pass it uncompiled, or use "
            "mode='torch' or opt_level='O2'"
        )
    allowed = _allowed_dtypes(recipe)
    yield from _find_overflows(model, recipe)
    odd = [name for name, p in params.items() if p.dtype not in allowed and p.dtype.is_floating_point]
    if odd:
        yield _dtype_problem(odd, params[odd[0]].dtype, recipe, mode)


def find_optimizer_problems(optimizer: Any, model: Any, recipe: Recipe) -> Iterator[str]:
    """What is wrong with the optimizer for this model."""
    if not isinstance(optimizer, optim.Optimizer):
        yield (
            "optimizer: a torch.optim.Optimizer over model.parameters() (or a callable `params -> Optimizer`) is "
            f"needed, but {_kind(optimizer)} was given"
        )
        return
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        yield (
            f"optimizer: {type(optimizer).__name__} has not called torch.optim.Optimizer.__init__ (super().__init__("
            "params, defaults)), without which its steps cannot be watched"
        )
        return
    if "zero_grad" in vars(optimizer):
        yield "optimizer: it belongs to another engine; close that one first (its close()), or build a new optimizer"
        return
    if getattr(optimizer, "is_converted", False):
        yield "optimizer: it comes from convert_to_amp; pass the one that was given there, after its close()"
        return
    yield from _find_lost_eps(optimizer, recipe)
    if needs_closure(optimizer):
        yield (
            f"optimizer: {type(optimizer).__name__}.step needs a closure that runs the model again, which cannot be "
            "joined with a loss scale, accumulation or a verdict shared by all ranks; use SGD, Adam, AdamW or "
            "another optimizer whose step() needs none"
        )
    if isinstance(model, nn.Module):
        foreign = foreign_params(optimizer, model.parameters())
        if foreign:
            yield (
                f"optimizer: it holds {len(foreign)} parameter(s) that are not the model's: {shorten(list(foreign))}; "
                "build it from model.parameters() of the model that is passed, or pass a callable `params -> Optimizer`"
            )


def _find_lost_eps(optimizer: optim.Optimizer, recipe: Recipe) -> Iterator[str]:
    """Without masters the optimizer computes in half precision, where Adam's 1e-8 is zero and 0 / 0 is nan."""
    if recipe.param_dtype not in HALF or recipe.master_weights:
        return
    smallest = 2.0**-24 if recipe.param_dtype == torch.float16 else 2.0**-133
    for index, group in enumerate(optimizer.param_groups):
        eps = group.get("eps")
        if isinstance(eps, float) and 0 < eps < smallest:
            yield (
                f"optimizer: eps={eps:g} of param_groups[{index}] is zero in {_short(recipe.param_dtype)}, and the "
                "optimizer divides by it where a gradient is zero: the weights would be nan; set eps=1e-4 or so, or "
                "keep fp32 masters (opt_level='O2' or mode='naive')"
            )


def find_criterion_problems(criterion: Any) -> Iterator[str]:
    """What is wrong with the criterion."""
    if isinstance(criterion, type) and issubclass(criterion, nn.Module):
        yield f"criterion: the class {criterion.__name__} was given, not a criterion; write {criterion.__name__}()"
    if criterion is not None and not callable(criterion):
        yield f"criterion: a callable (outputs, targets) -> loss is needed, but {_kind(criterion)} was given"


def find_other_problems(
    criterion: Any, dataloader: Any, eval_dataloader: Any, lr_scheduler: Any, optimizer: Any, config: Config
) -> Iterator[str]:
    """What is wrong with the rest."""
    yield from find_criterion_problems(criterion)
    for name, loader in (("dataloader", dataloader), ("eval_dataloader", eval_dataloader)):
        if loader is None:
            continue
        if isinstance(loader, DataLoader):
            if _length(loader) == 0:
                yield f"{name}: it is empty: {EMPTY}"
        elif isinstance(loader, Dataset):
            yield (
                f"{name}: a Dataset ({type(loader).__name__}) has no batch size; pass "
                "halfmesh.get_dataloader(dataset, batch_size=..., shuffle=True) or a torch DataLoader"
            )
        else:
            yield f"{name}: a torch.utils.data.DataLoader is needed, but {_kind(loader)} was given"
    yield from _find_scheduler_problems(lr_scheduler, optimizer, dataloader, config)


def _find_overflows(model: nn.Module, recipe: Recipe) -> Iterator[str]:
    """Values that the parameters' new dtype cannot hold."""
    if recipe.param_dtype is None:
        return
    for name, tensor in tensors_to_cast(model, recipe):
        problem = find_overflow(name, tensor.detach(), recipe.param_dtype)
        if problem is not None:
            yield f"model: {problem}"


def overflow_check(model: nn.Module, recipe: Recipe) -> Callable[[str, torch.Tensor], None]:
    """What raises InputError for a value of `model` (its name, and the value) that the recipe's dtype cannot hold."""
    dtype = recipe.param_dtype
    cast = set() if dtype is None else {name for name, _ in tensors_to_cast(model, recipe)}

    def check(name: str, value: torch.Tensor) -> None:
        problem = find_overflow(name, value, dtype) if dtype is not None and name in cast else None
        if problem is not None:
            raise InputError(f"model: {problem}")

    return check


def find_device_problem(device: torch.device, recipe: Recipe) -> str | None:
    """Why this device cannot train in the recipe's dtype: found by trying a matrix product and its backward."""
    dtype = recipe.compute_dtype
    if dtype not in HALF:
        return None
    try:
        if device.type == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
            raise RuntimeError("its compute capability is below 8.0")
        probe_dtype(device, dtype)
    except (RuntimeError, NotImplementedError) as error:
        name = str(dtype).removeprefix("torch.")
        other = "fp16" if dtype == torch.bfloat16 else "bf16"
        reason = str(error).splitlines()[0]
        return f"device {device}: it cannot multiply matrices in {name} ({reason}); use {other}, or no half precision"
    return None


def probe_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Raise RuntimeError if `device` lacks matrix products of `dtype`."""
    weight = torch.ones(8, 8, device=device, dtype=dtype, requires_grad=True)
    (torch.ones(8, 8, device=device, dtype=dtype) @ weight).sum().backward()


def needs_closure(optimizer: optim.Optimizer) -> bool:
    """Whether `optimizer.step` cannot be called without a closure (LBFGS)."""
    parameters = inspect.signature(optimizer.step).parameters
    return "closure" in parameters and parameters["closure"].default is inspect.Parameter.empty


def _find_scheduler_problems(lr_scheduler: Any, optimizer: Any, dataloader: Any, config: Config) -> Iterator[str]:
    if lr_scheduler is None:
        return
    if not hasattr(lr_scheduler, "step"):
        yield f"lr_scheduler: something with step() is needed, but {_kind(lr_scheduler)} was given"
        return
    theirs = getattr(lr_scheduler, "optimizer", optimizer)
    if theirs is not optimizer:
        yield "lr_scheduler: it was built on another optimizer than the one passed; build it on that one"
    needs_metric = isinstance(lr_scheduler, optim.lr_scheduler.ReduceLROnPlateau)
    if needs_metric and config.lr_interval != "manual":
        yield (
            "lr_scheduler: ReduceLROnPlateau.step needs a metric, which the engine does not have; set "
            "lr_interval='manual' and call engine.lr_scheduler.step(metric) yourself"
        )
    if config.lr_interval == "epoch" and dataloader is None:
        yield (
            "lr_scheduler: lr_interval='epoch' advances it when engine.dataloader ends, but no dataloader was passed; "
            "pass it to initialize, or set lr_interval='manual'"
        )


def _allowed_dtypes(recipe: Recipe) -> set[torch.dtype]:
    if recipe.param_dtype is None:
        return {torch.float32, torch.float64}
    if recipe.keep_batchnorm_fp32:  # fp32 that was rounded before is not fp32
        return {torch.float32}
    return {torch.float32, recipe.param_dtype}


def _dtype_problem(names: list[str], dtype: torch.dtype, recipe: Recipe, mode: str | None) -> str:
    found = f"model: {len(names)} parameter(s) are {_short(dtype)} ({shorten(names)})"
    key = "bf16" if dtype == torch.bfloat16 else "fp16"
    if mode is None:
        return (
            f"{found}, but the config has neither fp16 nor bf16: without fp32 masters small updates are lost; set "
            f"{key} = dict(mode='naive'), or build the model in float32"
        )
    if recipe.param_dtype is None:
        return (
            f"{found}, but mode={mode!r} keeps parameters in float32 and casts while it computes; build the model in "
            f"float32 (model.float()), or set {key} = dict(mode='naive')"
        )
    allowed = " or ".join(sorted(map(_short, _allowed_dtypes(recipe)), reverse=True))
    why = ", and BatchNorm stays in float32" if recipe.keep_batchnorm_fp32 else ""
    return f"{found}, but mode={mode!r} computes in {_short(recipe.compute_dtype)}{why}; build the model in {allowed}"


def _length(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader)
    except TypeError:  # an IterableDataset without a length
        return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
