"""The private names of torch that halfmesh relies on still do what it needs. Red: torch changed, look there first."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._inductor import config as inductor_config
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import halfmesh
from halfmesh import torch_private
from halfmesh.amp.recipe import LossScale
from tests.support import compiling
from tests.support.models import MatmulDtypes


def test_foreach_norm_accumulates_in_the_dtype_asked_for():
    grads = [torch.full((1000,), 200.0, dtype=torch.float16), torch.ones(4, dtype=torch.bfloat16), torch.ones(9)]
    norms = torch_private.foreach_norm(grads, 2.0, torch.float32)
    assert [n.dtype for n in norms] == [torch.float32] * 3
    torch.testing.assert_close(torch.stack(norms), torch.tensor([200 * 1000**0.5, 2.0, 3.0]))


def test_foreach_mul_takes_a_tensor():
    tensors = [torch.ones(2), torch.ones(3)]
    torch_private.foreach_mul_(tensors, torch.tensor(3.0))
    assert [t.tolist() for t in tensors] == [[3, 3], [3, 3, 3]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
@pytest.mark.parametrize("factor", [1 / 3, 1.3 * 2.0**-26])
def test_a_product_with_half_precision_rounds_once(dtype, shape, factor):
    tensor = torch.full(shape, 3e4, dtype=dtype)
    expected = (tensor.float() * factor).to(dtype)
    torch_private.multiply_wide_(tensor, torch.tensor(factor))
    assert torch.equal(tensor, expected)
    assert tensor.shape == shape


def test_foreach_copy_converts():
    targets = [torch.zeros(2, dtype=torch.float16), torch.zeros(1, dtype=torch.float16)]
    torch_private.foreach_copy_(targets, [torch.ones(2), torch.full((1,), 2.0)])
    assert [t.tolist() for t in targets] == [[1, 1], [2]]


def test_edit_stamp_sees_every_kind_of_edit():
    param = torch.nn.Parameter(torch.ones(3))
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


def test_memory_is_told_apart_while_it_is_known():
    param = torch.nn.Parameter(torch.ones(3))
    memory = torch_private.Memory(param)
    with torch.no_grad():
        param.fill_(2.0)
    assert memory.is_of(param)
    for _ in range(20):  # memory that was free would soon be used again
        param.data = torch.zeros(3)
        assert not memory.is_of(param)


def test_backward_through_memory_that_was_given_up():
    """As FSDP2 gives up gathered weights."""
    weight = torch.nn.Parameter(torch.ones(3, 3))
    out = (torch.ones(1, 3, requires_grad=True) @ weight.t()).sum()
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError) as caught:
        out.backward()
    assert torch_private.met_freed_storage(caught.value)
    wrapped = RuntimeError("a stage failed")
    wrapped.__cause__ = caught.value
    assert torch_private.met_freed_storage(wrapped)
    assert not torch_private.met_freed_storage(RuntimeError("something else"))


class _Half(nn.Module):
    """Uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch 2.13 and newer")
def test_gradients_of_unused_parameters_are_reduced_with_accumulated_ones():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch_private.fake_world(0, 2):
        model = fully_shard(_Half(), mesh=dist.init_device_mesh("cpu", (2,)), mp_policy=policy)
        model.set_reduce_scatter_unused_params(True)
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            if last:
                torch_private.add_missing_gradients(model)
            model(torch.ones(2, 4)).sum().backward()
        grads = {name: param.grad for name, param in model.named_parameters()}
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    assert not grads["unused.weight"].to_local().any()
    assert grads["used.weight"].to_local().shape == (2, 4)


def test_step_hooks():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    assert not torch_private.has_step_hooks(optimizer)
    own = optimizer.register_step_pre_hook(lambda *_: None)
    assert torch_private.has_step_hooks(optimizer)
    assert not torch_private.has_step_hooks(optimizer, besides=own)
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: None)
        assert torch_private.has_step_hooks(optimizer, besides=own)
        handle.remove()
        assert not torch_private.has_step_hooks(optimizer, besides=own)
    own.remove()
    optimizer.register_step_pre_hook(lambda *_: None)
    assert torch_private.has_step_hooks(optimizer, besides=own), "one that is not there does not count"


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_update_scale(found):
    """As GradScaler has it: one more, or back; doubled when there are three."""
    rule = LossScale(growth_interval=3)
    scale, tracker = torch.tensor(8.0), torch.tensor(1, dtype=torch.int32)
    torch_private.update_scale_(scale, tracker, torch.tensor(found), rule)
    assert (scale.item(), tracker.item()) == ((4.0, 0) if found else (8.0, 2))
    torch_private.update_scale_(scale, tracker, torch.tensor(0.0), rule)
    assert (scale.item(), tracker.item()) == ((4.0, 1) if found else (16.0, 0))


def test_edit_stamps():
    tensors = [torch.ones(2), torch.nn.Parameter(torch.ones(3))]
    before = torch_private.edit_stamps(tensors)
    assert before == [torch_private.edit_stamp(tensor) for tensor in tensors]
    tensors[0].add_(1)
    after = torch_private.edit_stamps(tensors)
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True]
    with torch.inference_mode():
        made = torch.ones(1)
    assert torch_private.edit_stamps([made]) == [torch_private.edit_stamp(made)]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.Rprop])
def test_bare_copy_steps_without_hooks_and_state(make):
    param, other, ran = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2)), []
    optimizer = make([param], lr=0.1)
    param.grad = torch.ones(2)
    optimizer.step()
    optimizer.register_step_pre_hook(lambda *_: ran.append("pre"))
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    state, groups = dict(optimizer.state), optimizer.param_groups
    clone = torch_private.bare_copy(optimizer, [{**groups[0], "params": [other]}])
    assert type(clone) is make
    assert dict(clone.state) == {}
    before = param.detach().clone()
    other.grad = torch.ones(2)
    clone.step()
    assert ran == []
    assert not torch.equal(other, torch.ones(2))
    assert other.tolist() == pytest.approx(before.tolist()), "the same first step as the first one"
    assert torch.equal(param, before)
    assert optimizer.param_groups is groups
    assert groups[0]["params"] == [param]
    assert dict(optimizer.state).keys() == state.keys()
    assert not torch_private.has_step_hooks(clone)
    clone.register_step_pre_hook(lambda *_: None)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    clone.zero_grad()
    assert param.grad is not None


def test_is_functorch_tensor_sees_what_lives_in_a_transform():
    seen = {}

    def note(name, x):
        seen[name] = torch_private.is_functorch_tensor(x), torch_private.is_functorch_tensor(weight.half())
        return x.sum()

    x, weight = torch.ones(2, 2), torch.nn.Parameter(torch.ones(2))
    assert not torch_private.is_functorch_tensor(x)
    torch.func.grad(lambda x: note("grad", x))(x)
    torch.func.vmap(lambda x: note("vmap", x))(x)
    torch.func.jvp(lambda x: note("jvp", x), (x,), (x,))
    torch.func.functionalize(lambda x: note("functionalize", x))(x)
    assert all(argument for argument, _ in seen.values())
    assert seen["grad"][1]
    assert seen["jvp"][1]
    assert not torch_private.is_functorch_tensor(weight)


def test_is_operator():
    assert torch_private.is_operator(torch.ops.aten.add)
    assert torch_private.is_operator(torch.ops.aten.add.Tensor)
    assert not any(torch_private.is_operator(f) for f in (torch.add, torch.Tensor.add, torch.einsum, len))


def test_is_batch_norm():
    nn = torch.nn
    norms = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm2d()]
    assert all(torch_private.is_batch_norm(module) for module in norms)
    others = [nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.InstanceNorm1d(2), nn.Linear(2, 2)]
    assert not any(torch_private.is_batch_norm(module) for module in others)


def test_no_other_private_name_of_torch_is_used():
    root = Path(halfmesh.__file__).parent
    found = [
        f"{path.name}: {line.strip()}"
        for path in root.rglob("*.py")
        if path.name != "torch_private.py"
        for line in path.read_text().splitlines()
        if re.search(r"torch\._(?!_version__)|from torch\S* import .*\b_", line)
    ]
    assert found == []


def test_is_compiled():
    part = nn.Linear(2, 2)
    assert not torch_private.is_compiled(part)
    assert torch_private.is_compiled(torch.compile(part, backend="eager"))
    assert not torch_private.is_compiled(part)
    part.compile(backend="eager")
    assert torch_private.is_compiled(part)


def test_fused_steps_are_what_fused_optimizers_call():
    names = {function.__name__ for function in torch_private.FUSED_STEPS}
    assert {"_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"} <= names


@pytest.mark.parametrize("assign", [True, False])
def test_load_hooks_are_told_of_assign(assign):
    seen, layer = [], nn.Linear(2, 2)
    layer.register_load_state_dict_pre_hook(lambda m, s, p, metadata, *_: seen.append(torch_private.assigns(metadata)))
    layer.load_state_dict(layer.state_dict(), assign=assign)
    assert seen == [assign]


def test_fake_mode():
    """Autocast, autograd and shapes as ever; no memory, and no values."""
    assert not torch_private.in_fake_mode()
    weight = torch.ones(3, 2, requires_grad=True)
    with torch_private.fake_mode(), torch.autocast("cpu", torch.bfloat16):
        assert torch_private.in_fake_mode()
        result = torch.empty(4, 2) @ torch.empty(3, 2, requires_grad=True).T
        assert (result.shape, result.dtype, result.requires_grad) == ((4, 3), torch.bfloat16, True)
        assert (torch.empty(4, 2) @ weight.T).requires_grad  # real tensors may take part
        large = torch.empty(2**50)
        assert (large + large).numel() == 2**50
        for ask in (lambda: result.sum().item(), lambda: bool(result[0, 0] > 0), lambda: result[result > 0]):
            with pytest.raises(torch_private.DATA_NEEDED):
                ask()
    assert not torch_private.in_fake_mode()


def test_tensors_of_a_mode_without_memory():
    """Who they belong to, what somebody has set on them, and that they can be exchanged."""
    mode = torch_private.FakeMode(allow_non_fake_inputs=True)
    with mode:
        layer = nn.Linear(2, 2)
    layer.weight.tag = "mine"
    assert torch_private.fake_mode_of(layer.weight) is mode
    assert torch_private.fake_mode_of(torch.ones(1)) is None
    assert torch_private.own_attributes(layer.weight) == {"tag": "mine"}
    real = nn.Parameter(torch.ones(2, 2))
    real.tag = "another"
    assert torch_private.own_attributes(real) == {"tag": "another"}
    torch_private.forget_fakes(mode)
    torch.utils.swap_tensors(layer.weight, real)
    assert (layer.weight.sum().item(), layer.weight.tag) == (4, "another")


def test_memory_has_a_number():
    one = torch.ones(4)
    assert torch_private.storage_id(one) == torch_private.storage_id(one.view(2, 2)[1])
    assert torch_private.storage_id(one) != torch_private.storage_id(torch.ones(4))


def test_what_operators_say_of_themselves():
    aten, x = torch.ops.aten, torch.ones(2)
    assert torch_private.written_arguments(aten.add_.Tensor, (x, 1), {}) == [x]
    assert torch_private.written_arguments(aten.add.Tensor, (x, 1), {}) == []
    assert torch_private.written_arguments(aten.add.out, (x, 1), {"out": x}) == [x]
    assert torch_private.draws(aten.normal_.default)
    assert not torch_private.draws(aten.fill_.Scalar)
    assert torch_private.leaves_unset(aten.empty.memory_format)
    assert torch_private.leaves_unset(aten.new_empty_strided.default)
    assert not torch_private.leaves_unset(aten.zeros.default)


def test_hooks_of_modules():
    class Owner:
        def hook(self, module, args):
            pass

    owner = Owner()
    assert not torch_private.count_call_hooks(nn.Linear(2, 2))
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        module = nn.Linear(2, 2)
        handle = getattr(module, f"register_{register}")(owner.hook)
        assert torch_private.count_call_hooks(module)
        assert torch_private.hook_owners(module) == ([owner] if register == "forward_pre_hook" else [])
        handle.remove()
        assert not torch_private.count_call_hooks(module)


class _Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        return self.inner(2 * x)


@pytest.mark.parametrize("module", [_Doubles(), nn.Sequential(nn.Identity(), nn.GELU())], ids=["own", "torch's"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compile_in_place(module, fullgraph):
    with compiling.watched() as compiled:
        torch_private.compile_in_place(module, 1, backend=compiling.NAME, fullgraph=fullgraph)
        assert torch_private.is_compiled(module)
        expected = module.forward(torch.ones(3))
        assert torch.equal(module(torch.ones(3)), expected)
        assert compiled.forwards == 1
        seen = []
        next(module.children()).register_forward_hook(lambda *_: seen.append(1))
        module(torch.ones(3))
        assert seen == [1]
        copied = copy.deepcopy(module)
        torch_private.uncompile(module)
        assert not torch_private.is_compiled(module)
        assert not torch_private.is_compiled(copied)
        module(torch.ones(3))
        assert compiled.forwards == 2


def test_more_recompiles():
    with compiling.watched() as compiled, dynamo_config.patch(recompile_limit=8):  # timm raises it for all
        module = _Doubles()
        torch_private.compile_in_place(module, 2, backend=compiling.NAME, dynamic=False)
        for size in range(2, 20):
            module(torch.ones(size))
        assert compiled.graphs == 16, "twice 8; torch gives up after that"


def test_compilers():
    assert torch_private.has_triton() in (True, False)
    try:
        assert torch_private.find_cpp_compiler()
    except RuntimeError as error:
        assert "compiler" in str(error).lower()  # noqa: PT017


def test_no_cpp_compiler():
    with (
        inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(RuntimeError, match=r"No working C\+\+"),
    ):
        torch_private.find_cpp_compiler()


def test_casts_of_parameters_are_known_by_how_they_came():
    param, frozen, x = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2), False), torch.ones(2, 2)
    is_cast = torch_private.is_cast_of_parameter
    for cast in (param.to(torch.bfloat16), param.to(torch.bfloat16).t(), param.half()[0]):
        assert is_cast(cast)
    for other in (param, param.t(), frozen.half(), x.requires_grad_().half(), (param * 2).half(), param.half() * 2):
        assert not is_cast(other)


def test_arguments_of_an_operator():
    names = [argument.name for argument in torch_private.arguments_of(torch.ops.aten.addmm.default)]
    assert names == ["self", "mat1", "mat2", "beta", "alpha"]


def test_is_watched_by_a_dispatch_mode():
    assert not torch_private.is_watched()
    with MatmulDtypes():
        assert torch_private.is_watched()
    assert not torch_private.is_watched()


def test_norms_that_keep_statistics():
    assert torch_private.keeps_statistics(nn.BatchNorm2d(2))
    assert torch_private.keeps_statistics(nn.SyncBatchNorm(2))
    assert torch_private.keeps_statistics(nn.InstanceNorm1d(2))
    assert not torch_private.keeps_statistics(nn.LayerNorm(2))
    assert not torch_private.keeps_statistics(nn.GroupNorm(1, 2))


def test_dry_run_mode_has_tensors_without_memory():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch_private.dry_run_mode():
            param = nn.Parameter(torch.ones(4, 4))
            assert torch_private.has_no_memory(param)
            assert not torch_private.in_fake_mode(), "it is a run, in which everything is sent"
            torch_private.edit_stamps([param])  # all memory is at address 0, which torch says with a warning
            with torch_private.fake_mode():
                assert torch_private.in_fake_mode()
            with torch_private.outside_of_dry_run():
                assert torch.ones(2).tolist() == [1.0, 1.0]
    assert not torch_private.has_no_memory(torch.ones(1))


def test_what_the_host_reads_in_a_dry_run():
    numbers = torch.arange(3)
    with torch_private.dry_run_mode():
        assert torch_private.value_without_memory(torch.tensor(2.5)) == 2.5
        assert torch_private.value_without_memory(torch.zeros(1) + 7) == 0
        assert torch_private.value_without_memory(torch.zeros(1, dtype=torch.int32) + 7) == 1
        parts = torch.tensor_split(torch.arange(3), 3)
        assert [torch_private.value_without_memory(part) for part in parts] == numbers.tolist()


def test_a_fake_world_has_one_rank_only():
    seen = []

    class Groups(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                seen.append((func._schema.name, torch_private.group_of_operator(args)))
            return func(*args, **(kwargs or {}))

    with torch_private.fake_world(5, 4096):
        assert torch_private.is_alone()
        group = dist.new_group([4, 5, 6, 7])
        assert torch_private.is_alone(group)
        with torch_private.dry_run_mode(), Groups():
            dist.all_reduce(torch.ones(3), group=group)
            dist.all_gather_into_tensor(torch.ones(12), torch.ones(3), group=group)
            dist.send(torch.ones(3), 6, group=group)
        assert [name for _, name in seen] == [group.group_name] * 3
        assert seen[0][0] == "c10d::allreduce_"
        assert seen[2][0] == "c10d::send"
    assert not dist.is_initialized()


def test_a_model_without_memory_is_moved_in_place():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model.append(nn.Linear(3, 3, bias=False))
        model[2].weight = model[0].weight
    with torch_private.dry_run_mode():
        torch_private.without_memory(model)
        params = list(model.parameters())
        assert model[2].weight is model[0].weight
        assert all(map(torch_private.has_no_memory, params))
        assert {str(tensor.device) for tensor in model.state_dict().values()} == {"cpu"}
        torch_private.move_module(model, torch.float16)
        assert [id(param) for param in model.parameters()] == [id(param) for param in params]
        assert {param.dtype for param in params} == {torch.float16} == {model[1].running_mean.dtype}
        assert model[1].num_batches_tracked.dtype == torch.int64
    plain = nn.Linear(2, 2)
    torch_private.move_module(plain, torch.float64)
    assert plain.weight.dtype == torch.float64


def test_metadata_of_checkpoints_is_read_as_plain_data(tmp_path):
    """What torch.distributed.checkpoint writes is read, dtypes and memory formats too; what calls something is not."""
    from torch.distributed import checkpoint

    written = {"half": torch.ones(2, 3, dtype=torch.float16), "number": torch.tensor(3)}
    checkpoint.save(written, checkpoint_id=tmp_path, no_dist=True)
    metadata = torch_private.read_checkpoint_metadata(tmp_path / ".metadata")
    assert {name: (info.size, info.properties.dtype) for name, info in metadata.state_dict_metadata.items()} == {
        "half": (torch.Size([2, 3]), torch.float16),
        "number": (torch.Size([]), torch.int64),
    }
    assert {info.relative_path for info in metadata.storage_data.values()} == {"__0_0.distcp"}
    for call, name in ((print, "builtins.print"), (torch.load, "torch.serialization.load"), (Path.home, "builtins")):
        (tmp_path / "other").write_bytes(pickle.dumps({"metadata": call}))
        with pytest.raises(pickle.UnpicklingError, match=name):
            torch_private.read_checkpoint_metadata(tmp_path / "other")
    (tmp_path / "other").write_bytes(pickle.dumps({"metadata": 3}))
    with pytest.raises(pickle.UnpicklingError, match="it holds a dict"):
        torch_private.read_checkpoint_metadata(tmp_path / "other")


def test_viewed():
    whole = torch.ones(4, 2)
    assert torch_private.viewed(whole) is whole
    assert torch_private.viewed(whole.t()[0]) is whole


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_backward_tells_a_forward_from_what_is_computed_again(reentrant):
    layer, seen = nn.Linear(2, 2), []
    layer.register_forward_pre_hook(lambda *_: seen.append(torch_private.in_backward()))
    x = torch.ones(1, 2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert seen == [False, True]
    assert not torch_private.in_backward()


def test_what_backward_computes_is_told_apart():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket is torch.ops.aten.mm:
                seen.append((torch_private.is_in_backward(), torch.is_grad_enabled()))
            return func(*args, **(kwargs or {}))

    def product(x):
        return (x @ x).sin()

    x = torch.ones(2, 2, requires_grad=True)
    with Watch():
        torch.utils.checkpoint.checkpoint(product, x, use_reentrant=False).sum().backward()
    assert seen[0] == (False, True)
    assert seen[1] == (True, True)  # computed again
    assert set(seen[2:]) == {(True, False)}
    assert len(seen) == 4


def test_formulas_of_operators():
    formulas = torch_private.flop_formulas()
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    assert formulas[torch.ops.aten.mm](a, b, out_val=a @ b) == 2 * 2 * 3 * 4
    q = torch.ones(1, 2, 4, 8)
    forward = formulas[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu](q, q, q, out_val=(q,))
    backward = formulas[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward](q, q, q, q, out_val=(q,))
    assert (forward, backward) == (2 * 2 * 2 * 4 * 4 * 8, 5 * 2 * 2 * 4 * 4 * 8)
    with torch_private.FakeMode():
        assert torch_private.is_fake(torch.ones(1))
    assert not torch_private.is_fake(a)
