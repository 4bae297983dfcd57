"""The only private names of torch that halfmesh uses, where there is no public form.

`tests/test_torch_private.py` fails when one of them changes.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import pickletools
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch.optim import optimizer as _all_optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

SOURCES = os.path.dirname(torch.__file__) + os.sep
"""Where torch's own code is."""

FUSED_STEPS = frozenset(
    getattr(torch, name) for name in dir(torch) if name.startswith("_fused_") and name.endswith("_")
)
"""What fused optimizers step with."""

DATA_NEEDED = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)
"""What is raised in a fake mode where something asks for values."""


set_grad_enabled = torch._C._set_grad_enabled
"""As `torch.set_grad_enabled`, which makes an object of each call."""


class ScaleRule(Protocol):
    """How a loss scale moves."""

    @property
    def growth_factor(self) -> float: ...
    @property
    def backoff_factor(self) -> float: ...
    @property
    def growth_interval(self) -> int: ...


def foreach_norm(tensors: Sequence[torch.Tensor], ord: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The `ord`-norm of each tensor, accumulated in `dtype`; 0-dim results. `tensors` must not be empty."""
    return list(torch._foreach_norm(list(tensors), ord, dtype=dtype))


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor in place by the 0-dim fp32 `factor`, without reading it on the host; rounds once."""
    halves = [] if factor.device.type == "cpu" else [tensor for tensor in tensors if tensor.dtype.itemsize == 2]
    for tensor in halves:
        multiply_wide_(tensor, factor)
    others = [tensor for tensor in tensors if tensor.dtype.itemsize != 2] if halves else list(tensors)
    if others:
        torch._foreach_mul_(others, factor)


def multiply_wide_(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply a half-precision tensor in place by the 0-dim fp32 `factor`, in fp32.

    CUDA's kernels would round a factor without dimensions to half precision first: 1/3 to 0.334 in bf16, and an
    unscaling by more than 2**25 to 0 in fp16. One with a dimension takes part in type promotion.
    """
    torch.mul(tensor, factor if tensor.dim() == 0 else factor.reshape(1), out=tensor)


def foreach_copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, converting the dtype where they differ."""
    torch._foreach_copy_(list(targets), list(sources))


def foreach_add_(targets: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Add each of `others` to its target, in place."""
    if targets:
        torch._foreach_add_(list(targets), list(others))


def foreach_lerp_(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], weight: float | torch.Tensor
) -> None:
    """targets + weight x (sources - targets), in place and in the targets' dtype, which is the same for all.

    Args:
        weight: a number, or 0-dim fp32 on a device, which is not read on the host.
    """
    wide = [source.to(target.dtype) for source, target in zip(sources, targets, strict=True)]
    if isinstance(weight, float):
        torch._foreach_lerp_(list(targets), wide, weight)
        return
    differences = torch._foreach_sub(wide, list(targets))
    torch._foreach_mul_(differences, weight)
    torch._foreach_add_(list(targets), differences)


def update_scale_(scale: torch.Tensor, tracker: torch.Tensor, found_inf: torch.Tensor, rule: ScaleRule) -> None:
    """Move `scale` (0-dim fp32) and `tracker` (0-dim int32) in place, as `torch.amp.GradScaler.update` does."""
    torch._amp_update_scale_(scale, tracker, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval)


def edit_stamps(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """`edit_stamp` of each."""
    try:
        return list(zip([tensor._version for tensor in tensors], map(torch.Tensor.data_ptr, tensors), strict=True))
    except RuntimeError:  # tensors made in inference mode have no version
        return [edit_stamp(tensor) for tensor in tensors]


def edit_stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes whenever `tensor` is written in place or given other memory (`tensor.data = ...`)."""
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # it was made in inference mode, and has no version
        return 0, tensor.data_ptr()


def without_storage(kind: type[torch.Tensor], like: torch.Tensor) -> Any:
    """A tensor of the class `kind`, which has `__torch_dispatch__`, with the metadata of `like` and no values."""
    return torch.Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
    )


def versions(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Of each how often it was written in place (0 where nobody counts: of None, and of what inference mode made)."""
    try:
        return [0 if tensor is None else tensor._version for tensor in tensors]
    except RuntimeError:
        return [0 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


def without_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A shallow copy of `loader` that starts workers of its own, where `loader` keeps some (persistent_workers)."""
    clone = copy.copy(loader)
    clone._iterator = None
    return clone


def takes_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `Optimizer.__init__` has run, without which no hook can be registered."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def has_step_hooks(optimizer: torch.optim.Optimizer, besides: RemovableHandle | None = None) -> bool:
    """Whether hooks run around `optimizer.step()`, those for all optimizers included; not counted is `besides`."""
    return has_step_pre_hooks(optimizer, besides) or has_step_post_hooks(optimizer)


def has_step_pre_hooks(optimizer: torch.optim.Optimizer, besides: RemovableHandle | None = None) -> bool:
    """As `has_step_hooks`, of those that run before a step, and may look at the gradients and change them."""
    known = set() if besides is None else {besides.id}
    return bool(_all_optimizers._global_optimizer_pre_hooks or set(optimizer._optimizer_step_pre_hooks) - known)


def has_step_post_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """As `has_step_hooks`, of those that run after a step."""
    return bool(optimizer._optimizer_step_post_hooks or _all_optimizers._global_optimizer_post_hooks)


def bare_copy(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """A shallow copy of `optimizer` over `groups`, without its state and the hooks around its `step`."""
    clone = copy.copy(optimizer)
    clone.state, clone.param_groups = defaultdict(dict), groups
    clone._optimizer_step_pre_hooks, clone._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return clone


def assigns(metadata: dict[str, Any]) -> bool:
    """Whether the `local_metadata` of a load hook says `assign=True`."""
    return bool(metadata.get("assign_to_params_buffers", False))


def is_functorch_tensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` lives only as long as a torch.func transform."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_operator(function: object) -> bool:
    """Whether `function` is one of `torch.ops`."""
    return isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` made it, or `module.compile()` was called."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def compile_in_place(module: nn.Module, recompiles: int, **options: Any) -> None:
    """Like `module.compile(**options)`, with three differences.

    A module whose forward is torch's own (Sequential, TransformerEncoderLayer) is compiled, too: before 2.15 torch
    skips it silently. Hooks that come and go on modules within are noticed: torch leaves such guards out. And torch
    allows 8 variants of one piece of code, for all modules that share it together, and goes on uncompiled after that:
    here there are `recompiles` times as many.
    """
    call: Any = module._call_impl
    if type(module).forward.__module__.partition(".")[0] == "torch":
        inner = module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

    module._compiled_call_impl = compiled(call, recompiles, **options)


def compiled(call: Callable[..., Any], recompiles: int, **options: Any) -> Callable[..., Any]:
    """Like `torch.compile(call, **options)`, with the last two of these differences."""
    from torch._dynamo import config as dynamo_config

    # These are no arguments of torch.compile; torch reads them when it compiles, in one of the calls.
    limit = dynamo_config.recompile_limit * recompiles
    within = dynamo_config.patch(recompile_limit=limit, skip_nnmodule_hook_guards=False)
    result: Callable[..., Any] = within(torch.compile(call, **options))
    return result


def uncompile(module: nn.Module) -> None:
    """Undo `compile_in_place`."""
    module._compiled_call_impl = None


def find_cpp_compiler() -> str:
    """The C++ compiler that inductor would use for the CPU. Raises RuntimeError if there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is one of a fake mode, without values."""
    return isinstance(tensor, fake_tensor.FakeTensor)


def is_in_backward() -> bool:
    """Whether this is called by a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Of operators, by packet (`torch.ops.aten.mm`): called with the operator's arguments and `out_val`. Those that are
    registered with `torch.utils.flop_counter.register_flop_formula` are among them."""
    from torch.utils import flop_counter

    # Attention on the CPU has none before torch 2.13.
    known, name = dict(flop_counter.flop_registry), "_scaled_dot_product_flash_attention"
    for kind in ("", "_backward"):
        known.setdefault(getattr(torch.ops.aten, f"{name}_for_cpu{kind}"), known[getattr(torch.ops.aten, name + kind)])
    return known


def has_triton() -> bool:
    """Whether inductor can generate code for this machine's GPU."""
    from torch.utils._triton import has_triton

    return bool(has_triton())


def has_grad_hooks(tensor: torch.Tensor) -> bool:
    """Whether somebody wants to be called with the gradient of `tensor`."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def met_freed_storage(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that the memory of a tensor was given up."""
    seen: BaseException | None = error
    while seen is not None:
        if "are out of bounds for storage of size 0" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


class Memory:
    """The memory of a tensor, which may be a DTensor; kept alive, so that no other has the same address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = tensor.untyped_storage()

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has it; not after `tensor.data = ...`."""
        return bool(tensor.untyped_storage()._cdata == self._storage._cdata)


def add_missing_gradients(unit: Any) -> None:
    """Before the last of several backwards: where FSDP2 holds gradients of `unit` in a wider dtype than its parameters
    have, let it hold zeros of that dtype for those parameters that had none.

    torch 2.13 makes these zeros itself, but in the parameters' dtype, and then refuses the mixture. (Older torch makes
    none; newer torch takes any.)
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    params = [] if group is None else [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    if not params or not group.reduce_scatter_unused_params or hasattr(type(params[0]), "unsharded_accumulated_grad"):
        return
    if all(param.unsharded_accumulated_grad is None for param in params):
        return
    for param in params:
        if param.unsharded_accumulated_grad is None and param._unsharded_param.requires_grad:
            param.unsharded_accumulated_grad = torch.zeros_like(param._unsharded_param, dtype=param.reduce_dtype)


def forget_composable_state(module: nn.Module) -> None:
    """Forget that `fully_shard` was applied to `module`; without it a second one would be refused."""
    from torch.distributed import _composable_state

    _composable_state._module_state_mapping.pop(module, None)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether `module` is BatchNorm of any dimension, SyncBatchNorm, or derived from them."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def keeps_statistics(module: nn.Module) -> bool:
    """Whether `module` is BatchNorm or InstanceNorm: what it returns in training does not depend on its buffers."""
    return isinstance(module, nn.modules.batchnorm._NormBase)


class _ShapesOnly(fake_tensor.FakeTensorMode):
    """Told from the mode of a dry run, in which all is done as in a run."""


@contextmanager
def fake_mode() -> Iterator[None]:
    """Tensors made within have a shape, a dtype and a device, and no memory; autocast and autograd work."""
    with _ShapesOnly(allow_non_fake_inputs=True):
        yield


def in_fake_mode() -> bool:
    """Whether this is within `fake_mode`, where only shapes count: nothing is sent, and nothing drawn."""
    return isinstance(torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE), _ShapesOnly)


@contextmanager
def dry_run_mode() -> Iterator[None]:
    """Tensors made within have no memory, and what is sent between them goes to a group of `fake_world`."""
    with warnings.catch_warnings():
        # Whether memory is the same is asked in many places. Here all is at address 0, which is said with a warning.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
            yield


@contextmanager
def outside_of_dry_run() -> Iterator[None]:
    """Tensors made within have memory in a dry run, too: something is tried out on their values."""
    with fake_tensor.unset_fake_temporarily():
        yield


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether `tensor` was made in a fake mode, or in a dry run."""
    return isinstance(tensor, fake_tensor.FakeTensor)


def without_memory(model: nn.Module) -> None:
    """Give the parameters and buffers of `model`, which is on the meta device or was made in another mode without
    memory, to the CPU of the dry run, in place."""
    made: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = on_cpu_without_memory(tensor)
        return made[id(tensor)]

    for module in model.modules():
        places: list[Any] = [module._parameters, module._buffers, vars(module)]
        for held in places:
            for name, tensor in list(held.items()):
                if isinstance(tensor, torch.Tensor) and (tensor.is_meta or has_no_memory(tensor)):
                    held[name] = move(tensor)


def on_cpu_without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like `tensor`, a parameter if it is one, on the CPU of the dry run."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def move_module(module: nn.Module, to: torch.device | torch.dtype) -> None:
    """`module.to(to)`; that of torch exchanges parameters that have no memory instead of changing them."""
    if not any(map(has_no_memory, module.parameters())):
        module.to(to)
        return
    for param in module.parameters():
        if param.is_floating_point() or isinstance(to, torch.device):
            param.data = param.data.to(to)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and (buffer.is_floating_point() or isinstance(to, torch.device)):
                part._buffers[name] = buffer.to(to)


def value_without_memory(tensor: torch.Tensor) -> float | int:
    """What the host reads from `tensor` of one element in a dry run: its value where it is a constant, else a guess.

    The guess is 0 (no gradient is inf or nan; nothing is wrong), but for two kinds of integers that torch's pipelines
    read: an int32 is torch 2.13's vote on whether all stages know their shapes, which is 1; an int64 is the number of a
    microbatch, cut out of arange(n), which is where it lies in memory.
    """
    constant = getattr(tensor, "constant", None)
    if constant is not None:
        return constant.item()
    if tensor.dtype == torch.int32:
        return 1
    return int(tensor.storage_offset()) if tensor.dtype == torch.int64 else 0


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """A process group of `size` ranks, of which this process is one and the others do not exist: it sends to nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_alone(group: dist.ProcessGroup | None = None) -> bool:
    """Whether `group` (None: of all ranks) is one of `fake_world`, where nobody else has anything to tell."""
    return dist.get_backend(group) == "fake"


def group_of_operator(args: Sequence[Any]) -> str | None:
    """The name of the process group among the arguments of an operator of torch.distributed; None if there is none."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return str(dist.ProcessGroup.unbox(arg).group_name)
            except RuntimeError:  # a ReduceOp
                continue
    return None


def count_call_hooks(module: nn.Module) -> int:
    """How many hooks run when `module` is called, or in its backward."""
    forward = len(module._forward_hooks) + len(module._forward_pre_hooks)
    return forward + len(module._backward_hooks) + len(module._backward_pre_hooks)


def hook_owners(module: nn.Module) -> list[Any]:
    """The objects whose methods run before `module` is called."""
    return [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]


def arguments_of(op: Any) -> Sequence[Any]:
    """The arguments that an operator of `torch.ops` declares."""
    return list(op._schema.arguments)


def is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a trained parameter in another dtype, as autocast makes it, or a view of that."""
    node: Any = (tensor if tensor._base is None else tensor._base).grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)


def viewed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that `tensor` is a view of; itself if it is none."""
    return tensor if tensor._base is None else tensor._base


def in_backward() -> bool:
    """Whether this is called by a backward that runs: by a hook, or where activations are computed again."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_watched() -> bool:
    """Whether a TorchDispatchMode sees what is computed, and may hold results."""
    return _get_current_dispatch_mode() is not None


FakeMode: Any = fake_tensor.FakeTensorMode
"""A mode in which tensors are made that have no memory."""


def fake_mode_of(tensor: torch.Tensor) -> Any:
    """The mode in which `tensor` was made, if it has no memory; None of others."""
    return tensor.fake_mode if isinstance(tensor, fake_tensor.FakeTensor) else None


def forget_fakes(mode: Any) -> None:
    """Have `mode` hold no weak references to tensors that were made in it: they prevent `torch.utils.swap_tensors`."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def own_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What somebody has set on `tensor`, also on one that has no memory, which has attributes of torch's, too."""
    if not isinstance(tensor, fake_tensor.FakeTensor):
        return dict(vars(tensor))
    with tensor.fake_mode:
        of_torch = vars(torch.empty(0)).keys() | {"_is_param"}
    return {name: value for name, value in vars(tensor).items() if name not in of_torch}


def storage_id(tensor: torch.Tensor) -> int:
    """The same for tensors that share memory, as long as one of them lives; also of those that have none."""
    return int(tensor.untyped_storage()._cdata)


def written_arguments(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Those arguments of an operator that it writes to."""
    declared = function._schema.arguments
    given = [*zip(declared, args, strict=False), *((a, kwargs[a.name]) for a in declared if a.name in kwargs)]
    return [value for arg, value in given if arg.alias_info is not None and arg.alias_info.is_write]


def draws(function: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in function.tags


def leaves_unset(function: Any) -> bool:
    """Whether an operator makes memory without writing to it."""
    return str(function._schema.name).startswith(("aten::empty", "aten::new_empty"))


_IN_METADATA = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},  # since Python 3.13
}
"""What torch.distributed.checkpoint pickles into `.metadata`, by module."""


class _MetadataUnpickler(pickle.Unpickler):
    """Makes plain data of what belongs into `.metadata`, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_plain = module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        if not is_plain and name not in _IN_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        return super().find_class(module, name)


def _refuse_far_places(content: bytes) -> None:
    """Raise UnpicklingError if a pickle keeps a value under a number for which its reader would make gigabytes: it has
    a list of all numbers below."""
    for opcode, number, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and number > len(content):  # type: ignore[operator]
            raise pickle.UnpicklingError(f"it keeps a value under the number {number}, of {len(content)} bytes")


def read_checkpoint_metadata(path: str | os.PathLike[str]) -> Any:
    """The `.metadata` of a folder of torch.distributed.checkpoint, which reads it with a plain `pickle.load`.

    Raises:
        pickle.UnpicklingError: it holds something else than that.
    """
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    with open(path, "rb") as file:
        content = file.read()
    _refuse_far_places(content)
    metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata
