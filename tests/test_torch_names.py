"""The private names of torch that several rooms rely on do what they need. Red: torch changed; look there first."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import halfmesh
from halfmesh.utils import torch_private as _torch

ROOT = Path(halfmesh.__file__).parent
OBJECTS = (
    torch.ones(1),
    torch.ones(1).untyped_storage(),
    nn.Linear(1, 1),
    torch.optim.SGD([torch.ones(1)]),
    DataLoader([1]),
    torch.ops.aten.add.Tensor,
)
OF_OBJECTS = {name for thing in OBJECTS for name in dir(thing) if name.startswith("_") and not name.startswith("__")}
DOCUMENTED = {"_python_dispatch", "_pytree"}  # modules, by torch's notes on extending it
TORCH_PRIVATE = """
    _C _DisableFuncTorch _TorchDispatchModeKey _amp_foreach_non_finite_check_and_unscale_
    _backward_hooks _compiled_call_impl _current_graph_task_id _foreach_copy_
    _foreach_zero_ _get_dispatch_mode _get_tracing_state _set_tracing_state _forward_hooks
    _forward_pre_hooks _disable_current_modes _subclasses _version
"""
ALLOWED = {
    "utils/torch_private.py": set(TORCH_PRIVATE.split()),
    "amp/stepper.py": {"_optimizer_step_post_hooks", "_optimizer_step_pre_hooks"},
    "amp/grad_norm.py": {"_foreach_norm"},
    "amp/loss_scaler.py": {"_amp_update_scale_", "_foreach_add_"},
    "amp/o1.py": {"_C", "_functorch"},
    "engine/compilation.py": {"_call_impl", "_compiled_call_impl", "_dynamo"},
    "engine/deferred.py": {"_buffers", "_parameters"},
    "engine/recording.py": {"_schema"},
    "data/sharding.py": {"_iterator"},
    "engine/ema.py": {"_foreach_add_", "_foreach_lerp_", "_foreach_sub"},
    "parallel/collectives.py": {"_get_current_dispatch_mode"},
    "parallel/context/attention.py": {"_get_current_dispatch_mode"},
    "engine/offload.py": {"_base"},
    "parallel/sharding/zero1.py": {"_foreach_add_"},
    "parallel/pipeline/fx_trace.py": {"_buffers"},
    "parallel/sharding/fsdp_wrap.py": {"_fsdp_param", "_fully_shard"},
    "parallel/data_strategy.py": {"_make_wrapper_subclass"},
    "trainer/profiling.py": {"_dump_snapshot", "_record_memory_history"},
}


def private_names(path: Path) -> Iterator[str]:
    """Private names of torch that a file uses: in imports, after `torch.` or `nn.`, and of torch's objects."""
    for node in ast.walk(ast.parse(path.read_text())):
        words = []
        if isinstance(node, ast.Attribute):
            base = ast.unparse(node.value)
            root = base.partition(".")[0]
            of_torch = root in ("torch", "nn", "dist", "_composable_state") and not base.startswith("torch.ops.")
            if of_torch or (base not in ("self", "cls", "super()") and node.attr in OF_OBJECTS):
                words = [node.attr]
        elif isinstance(node, ast.Import):
            words = [word for name in node.names if name.name.startswith("torch") for word in name.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and not node.level and str(node.module).startswith("torch"):
            words = [*str(node.module).split("."), *(name.name for name in node.names)]
        yield from (word for word in words if word.startswith("_") and not word.startswith("__"))


def test_private_names_stand_where_they_are_known():
    found = {}
    for path in ROOT.rglob("*.py"):
        names = set(private_names(path)) - DOCUMENTED
        if names and not path.name.startswith("apex"):
            found[path.relative_to(ROOT).as_posix()] = names
    assert found == ALLOWED


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1 / 3, 1.3 * 2.0**-26, 7.7])
def test_a_product_rounds_once(dtype, factor):
    factor = torch.tensor(factor)
    tensors = [torch.full(shape, 3e4, dtype=dtype) for shape in ((), (5,), (3, 4), (0, 2))]
    tensors.append(torch.full((4, 6), 3e4, dtype=dtype).t()[::2])
    wide = torch.promote_types(dtype, torch.float32)
    expected = [(tensor.to(wide) * factor).to(dtype) for tensor in tensors]
    _torch.foreach_mul_(tensors, factor)
    assert all(map(torch.equal, tensors, expected))


def test_edit_stamps_see_every_kind_of_edit():
    param = nn.Parameter(torch.ones(3))
    stamps = [_torch.edit_stamp(param)]
    with torch.no_grad():
        param.fill_(2.0)
    stamps.append(_torch.edit_stamp(param))
    param.data = torch.zeros(3)
    stamps.append(_torch.edit_stamp(param))
    assert len(set(stamps)) == 3
    param.sum().backward()
    param.grad = None
    assert _torch.edit_stamp(param) == stamps[-1]
    with torch.inference_mode():
        uncounted = torch.ones(3)
    assert _torch.versions([None, uncounted, torch.ones(3).add_(1)]) == [0, 0, 1]


def test_tensors_without_memory():
    assert not _torch.in_shapes_only()
    with _torch.shapes_only():
        made = torch.ones(2, 3, dtype=torch.float16) @ torch.ones(3, 4, dtype=torch.float16)
        assert _torch.in_shapes_only()
        with _torch.with_memory():
            assert not _torch.has_no_memory(torch.ones(1))
            assert not _torch.in_shapes_only()
        for ask in (torch.Tensor.item, torch.Tensor.nonzero):
            with pytest.raises(_torch.DATA_NEEDED):
                ask(made[0, 0])
    assert (made.shape, made.dtype, made.device.type) == ((2, 4), torch.float16, "cpu")
    assert _torch.has_no_memory(made)
    with _torch.FakeTensorMode():
        layer = nn.Linear(2, 2)
        weight = layer.weight
        _torch.move_module(layer, torch.float16)
    assert layer.weight is weight
    assert weight.dtype == torch.float16
