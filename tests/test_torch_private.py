"""The private names of torch that halfmesh relies on still do what it needs. Red: torch changed, look there first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import halfmesh
from halfmesh import torch_private


def test_no_other_private_name_of_torch_is_used():
    root = Path(halfmesh.__file__).parent
    found = [
        f"{path.name}: {line.strip()}"
        for path in root.rglob("*.py")
        if path.name not in ("torch_private.py", "_torch.py")
        for line in path.read_text().splitlines()
        if re.search(r"torch\._(?!_version__|_file__)|from torch\S* import .*\b_", line)
    ]
    assert found == []


# -- numbers ---------------------------------------------------------------------------------------------------


def test_operations_on_lists_of_tensors():
    grads = [torch.full((1000,), 200.0, dtype=torch.float16), torch.ones(4, dtype=torch.bfloat16), torch.ones(9)]
    norms = torch_private.foreach_norm(grads, 2.0, torch.float32)
    assert [n.dtype for n in norms] == [torch.float32] * 3, "added up in fp32"
    torch.testing.assert_close(torch.stack(norms), torch.tensor([200 * 1000**0.5, 2.0, 3.0]))
    tensors = [torch.ones(2), torch.ones(3)]
    torch_private.foreach_mul_(tensors, torch.tensor(3.0))
    assert [t.tolist() for t in tensors] == [[3, 3], [3, 3, 3]]
    targets = [torch.zeros(2, dtype=torch.float16), torch.zeros(1, dtype=torch.float16)]
    torch_private.foreach_copy_(targets, [torch.ones(2), torch.full((1,), 2.0)])
    assert [t.tolist() for t in targets] == [[1, 1], [2]]
    for weight in (0.25, torch.tensor(0.25)):
        targets = [torch.zeros(2), torch.ones(1)]
        torch_private.foreach_lerp_(
            targets, [torch.full((2,), 4.0, dtype=torch.float16), torch.full((1,), 5.0)], weight
        )
        assert [t.tolist() for t in targets] == [[1, 1], [2]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [1 / 3, 1.3 * 2.0**-26])
def test_a_product_with_half_precision_rounds_once(dtype, factor):
    for shape in ((), (5,), (3, 4)):
        tensor = torch.full(shape, 3e4, dtype=dtype)
        expected = (tensor.float() * factor).to(dtype)
        torch_private.foreach_mul_([tensor], torch.tensor(factor))
        assert torch.equal(tensor, expected)


# -- what was done to a tensor ---------------------------------------------------------------------------------


def test_versions_count_what_is_written_in_place():
    with torch.inference_mode():
        uncounted = torch.ones(2)
    held = [torch.ones(2), None, torch.ones(2).to_sparse()]
    before = torch_private.versions(held)
    held[0].mul_(2)
    assert [now - then for now, then in zip(torch_private.versions(held), before, strict=True)] == [1, 0, 0]
    assert torch_private.versions([*held, uncounted]) == [*torch_private.versions(held), 0]


def test_tensors_without_storage():
    class Nothing(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise ArithmeticError(str(function))

    param = nn.Parameter(torch.ones(2, 3).half().t())
    made = torch_private.without_storage(Nothing, param)
    assert (made.shape, made.stride(), made.dtype) == (param.shape, param.stride(), param.dtype)
    param.grad = made
    assert param.grad is made
    with pytest.raises(ArithmeticError, match=r"linalg_vector_norm"):
        nn.utils.clip_grad_norm_([param], 1.0)


def test_edit_stamps_see_every_kind_of_edit():
    param = nn.Parameter(torch.ones(3))
    stamps = [torch_private.edit_stamp(param)]
    with torch.no_grad():
        param.fill_(2.0)
    stamps.append(torch_private.edit_stamp(param))
    param.data = torch.zeros(3)
    stamps.append(torch_private.edit_stamp(param))
    assert len(set(stamps)) == 3
    param.sum().backward()
    param.grad = None
    assert torch_private.edit_stamp(param) == stamps[-1]
    with torch.inference_mode():
        made = torch.ones(1)
    assert torch_private.edit_stamps([param, made]) == [stamps[-1], torch_private.edit_stamp(made)]


def test_memory_is_told_apart_while_it_is_known():
    param = nn.Parameter(torch.ones(3))
    memory = torch_private.Memory(param)
    with torch.no_grad():
        param.fill_(2.0)
    assert memory.is_of(param)
    for _ in range(20):  # memory that was free would soon be used again
        param.data = torch.zeros(3)
        assert not memory.is_of(param)
    assert torch_private.storage_id(made := torch.ones(4)) == torch_private.storage_id(made.view(2, 2)[1])


def test_casts_of_parameters_are_known_by_how_they_came():
    param, frozen, x = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2), False), torch.ones(2, 2)
    for cast in (param.to(torch.bfloat16), param.to(torch.bfloat16).t(), param.half()[0]):
        assert torch_private.is_cast_of_parameter(cast)
    for other in (param, param.t(), frozen.half(), x.requires_grad_().half(), (param * 2).half(), param.half() * 2):
        assert not torch_private.is_cast_of_parameter(other)


# -- optimizers, modules and their hooks -----------------------------------------------------------------------


def test_step_hooks():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    own = optimizer.register_step_pre_hook(lambda *_: None)
    assert torch_private.has_step_hooks(optimizer)
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        assert not torch_private.has_step_hooks(optimizer, besides=own)
        handle = register(lambda *_: None)
        assert torch_private.has_step_hooks(optimizer, besides=own)
        handle.remove()


def test_fused_steps_are_what_fused_optimizers_call():
    names = {function.__name__ for function in torch_private.FUSED_STEPS}
    assert {"_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"} <= names


def test_norms_are_told_apart():
    batch = [nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm2d()]
    assert all(map(torch_private.is_batch_norm, batch))
    others = [nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.InstanceNorm1d(2), nn.Linear(2, 2)]
    assert not any(map(torch_private.is_batch_norm, others))
    keep = [torch_private.keeps_statistics(norm) for norm in (*batch[:3], *others[:3])]
    assert keep == [True, True, True, False, False, True]


def test_hooks_of_modules():
    class Owner:
        def hook(self, module, args):
            pass

    owner = Owner()
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        module = nn.Linear(2, 2)
        handle = getattr(module, f"register_{register}")(owner.hook)
        assert torch_private.count_call_hooks(module)
        assert torch_private.hook_owners(module) == ([owner] if register == "forward_pre_hook" else [])
        handle.remove()
        assert not torch_private.count_call_hooks(module)


@pytest.mark.parametrize("assign", [True, False])
def test_load_hooks_are_told_of_assign(assign):
    seen, layer = [], nn.Linear(2, 2)
    layer.register_load_state_dict_pre_hook(lambda m, s, p, metadata, *_: seen.append(torch_private.assigns(metadata)))
    layer.load_state_dict(layer.state_dict(), assign=assign)
    assert seen == [assign]


# -- operators and backward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_is_told_from_what_is_computed_again_in_backward(reentrant):
    layer, seen = nn.Linear(2, 2), []
    layer.register_forward_pre_hook(lambda *_: seen.append(torch_private.in_backward()))
    x = torch.ones(1, 2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert seen == [False, True]
    assert not torch_private.in_backward()


def test_backward_through_memory_that_was_given_up():
    """As FSDP2 gives up gathered weights."""
    weight = nn.Parameter(torch.ones(3, 3))
    out = (torch.ones(1, 3, requires_grad=True) @ weight.t()).sum()
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError) as caught:
        out.backward()
    assert torch_private.met_freed_storage(caught.value)
    assert not torch_private.met_freed_storage(RuntimeError("something else"))
