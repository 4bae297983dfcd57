"""The private torch names that several packages use, because torch has no public form of them.

`tests/test_torch_names.py` fails when one of them changes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import _disable_current_modes

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

# Modules with `running_mean` and `running_var`; in training their output does not depend on these buffers.
RUNNING_STATISTICS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor in place by the 0-dim `factor`; half precision rounds once.

    One launch for all tensors of a dtype, and no host read; on other devices than that of `factor` with a copy of it.
    `Tensor._version` does not count it.

    Args:
        factor: fp32; or float64: tensors in float64 are then multiplied in float64, by a launch each that counts as a
            write, and others in fp32.
    """
    # torch._foreach_mul_ rounds a 0-dim CUDA factor to the tensors' dtype first: 1/3 to 0.334 in bf16, 2**-26 to 0 in
    # fp16. GradScaler's kernel does not.
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    narrow = factor.float()
    for (dtype, device), same in by_kind.items():
        if dtype == factor.dtype == torch.float64:
            for tensor in same:
                tensor.mul_(factor.to(device))
        else:
            here = narrow.to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(same, torch.zeros_like(here), here)


def foreach_copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target and convert its dtype; one launch for each pair of dtypes."""
    # With several dtypes in one list CUDA launches a copy per tensor; before torch 2.11 it wrote wrong values.
    by_dtypes: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        by_dtypes.setdefault((target.dtype, source.dtype), []).append((target, source))
    for pairs in by_dtypes.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def foreach_zero_(tensors: Sequence[torch.Tensor]) -> None:
    """Fill the tensors with zeros, in one launch."""
    torch._foreach_zero_(list(tensors))


ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
# Functions of torch.distributed: torch 2.14 warns of the older names.
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather(output: torch.Tensor, x: torch.Tensor, **options: Any) -> Any:
    """Fill `output` with the ranks' `x`, one after the other along dim 0."""
    return getattr(dist, ALL_GATHER)(output, x, **options)


def reduce_scatter(output: torch.Tensor, x: torch.Tensor, **options: Any) -> Any:
    """Fill `output` with this rank's shard, along dim 0, of the sum of the ranks' `x`."""
    return getattr(dist, REDUCE_SCATTER)(output, x, **options)


# Functions that a TorchFunctionMode sees, and that call autograd.
BACKWARD = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})


def without_override(func: FunctionType, **replaced: Any) -> FunctionType:
    """A copy of a Python function of torch that does not dispatch to overrides of itself: a TorchFunctionMode can call
    it and see each function that it calls.

    Args:
        replaced: functions that it calls, by name, in place of those of its module.
    """
    asks = [name for name in func.__code__.co_names if name.startswith("has_torch_function")]
    names = {**func.__globals__, **dict.fromkeys(asks, lambda *_: False), **replaced}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


# A scope in which subclasses of Tensor do not see torch's functions.
without_subclasses: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
# A scope in which neither they nor modes of torch's functions see them.
without_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction


@contextmanager
def without_observers() -> Iterator[None]:
    """A scope in which neither subclasses of Tensor see torch's functions nor its modes, of functions, operations and
    torch.func, nor torch.jit.trace."""
    traced = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with without_functions(), torch._C._DisableFuncTorch(), _disable_current_modes():
            yield
    finally:
        torch._C._set_tracing_state(traced)  # type: ignore[attr-defined]


def versions(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """The number of in-place writes to each tensor; 0 for None, and if torch does not count (inference mode)."""
    with without_subclasses():  # it reads no values
        try:
            return [0 if tensor is None else tensor._version for tensor in tensors]
        except RuntimeError:  # some are of inference mode
            return [0 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


def edit_stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """A stamp that changes when `tensor` is written in place or gets other memory (`tensor.data = ...`)."""
    return versions([tensor])[0], tensor.data_ptr()


WriteStamp = tuple[int, torch.UntypedStorage]


def write_stamps(tensors: Sequence[torch.Tensor]) -> list[WriteStamp]:
    """`edit_stamp` of each tensor, for stamps that are kept long: they also keep the memory, so that no later memory of
    the tensor has its address."""
    written = versions(tensors)
    with without_subclasses():
        return [(version, tensor.untyped_storage()) for version, tensor in zip(written, tensors, strict=True)]


def storages(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The memory of each tensor, not to read values from."""
    with without_subclasses():
        return [tensor.untyped_storage() for tensor in tensors]


def grad_hooks(given: torch.Tensor | nn.Module) -> list[Any]:
    """The hooks that run when a tensor gets a gradient, or in the backward of a module."""
    others = [getattr(given, name, None) for name in ("_backward_pre_hooks", "_post_accumulate_grad_hooks")]
    return [hook for hooks in (given._backward_hooks, *others) for hook in (hooks or {}).values()]


def call_hooks(module: nn.Module) -> list[Any]:
    """The hooks that run when `module` is called, and in its backward."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values(), *grad_hooks(module)]


def is_compiled(module: nn.Module) -> bool:
    """Return True if `module` comes from `torch.compile(...)`, or `module.compile()` was called."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def is_in_backward() -> bool:
    """Return True if this is called from a running backward: from a hook, or during recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def assigns(local_metadata: dict[str, Any]) -> bool:
    """Return True if a load hook runs in `load_state_dict(..., assign=True)`."""
    return bool(local_metadata.get("assign_to_params_buffers", False))


# -- tensors with a shape and no memory ------------------------------------------------------------------------------

# A mode in which operators make tensors with shape, dtype and device but no memory; autograd and autocast work.
FakeTensorMode: Any = fake_tensor.FakeTensorMode

# Raised if an operator needs the values of such tensors.
DATA_NEEDED = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)


@contextmanager
def shapes_only() -> Iterator[None]:
    """A scope in which new tensors have no memory, and torch's collectives on them send nothing."""
    log = logging.getLogger(fake_tensor.__name__)  # it writes the stack of an error that the caller may expect
    was_disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            # Many functions compare memory addresses. Here all memory is at address 0, of which torch warns.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            with FakeTensorMode(allow_non_fake_inputs=True):
                yield
    finally:
        log.disabled = was_disabled


def in_shapes_only() -> bool:
    """Return True if this is within `shapes_only`: in a dry run, or where a pipeline infers shapes."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextmanager
def with_memory() -> Iterator[None]:
    """A scope in which new tensors have memory, also within `shapes_only`."""
    with fake_tensor.unset_fake_temporarily():
        yield


# A scope whose operators are hidden from modes that watch torch's operators, such as a counter of FLOPs.
unobserved: Callable[[], AbstractContextManager[None]] = _disable_current_modes


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` was made in a `FakeTensorMode`."""
    return isinstance(tensor, fake_tensor.FakeTensor)


def move_module(module: nn.Module, to: torch.device | torch.dtype) -> None:
    """`module.to(to)`, in place also for parameters without memory, which torch would replace."""
    if not any(map(has_no_memory, module.parameters())):
        module.to(to)
        return
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point() or isinstance(to, torch.device):
            tensor.data = tensor.data.to(to)
