"""What is computed again in backward is what was computed before, and changes nothing."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from halfmesh.errors import InputError
from halfmesh.parallel import recompute
from halfmesh.parallel.recompute import Checkpointed

WIDTH = 32


class Block(nn.Module):
    """Normalises, drops, and has a keyword."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = norm or nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        return x + scale * self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))


class Counting(nn.Module):
    """Multiplies by a buffer that each call changes, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))
        self.register_buffer("table", torch.arange(float(WIDTH)))
        self.in_place = in_place
        self.moves = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.moves:
            if self.in_place:
                self.factor.mul_(2)
            else:
                self.factor = self.factor * 2
        return x * self.factor.clone() + self.table


def make(norm: nn.Module | None = None) -> Block:
    torch.manual_seed(0)
    return Block(copy.deepcopy(norm))


def grads_of(block: Block, calls: int = 2, before_backward: Any = lambda: None, **kwargs: Any) -> dict[str, Any]:
    """Gradients and buffers after `calls` forwards and a backward through all of them."""
    torch.manual_seed(1)
    xs = [torch.randn(8, WIDTH, requires_grad=True) for _ in range(calls)]
    loss = sum(block(x, **kwargs).square().sum() for x in xs)
    torch.rand(3)
    before_backward()
    loss.backward()
    found = {name: param.grad.clone() for name, param in block.named_parameters()}
    found |= {f"x{number}": x.grad for number, x in enumerate(xs)}
    found |= {name: buffer.clone() for name, buffer in block.named_buffers()}
    return found | {"next": torch.rand(3)}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def saved_bytes(call: Any) -> int:
    """The bytes of what waits for backward, each memory once."""
    alive = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(alive.values())


NORMS = {
    "layer": nn.LayerNorm(WIDTH),
    "batch": nn.BatchNorm1d(WIDTH),
    "batch, cumulative": nn.BatchNorm1d(WIDTH, momentum=None),
    "spectral": nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "in place": Counting(in_place=True),
    "replaced": Counting(in_place=False),
}


@pytest.mark.parametrize("keep_products", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_and_buffers(norm, keep_products):
    expected = grads_of(make(NORMS[norm]))
    block = make(NORMS[norm])
    Checkpointed(block, keep_products)
    assert_equal(grads_of(block), expected)
    assert_equal(grads_of(block, calls=1), grads_of_second(norm))


def grads_of_second(norm: str) -> dict[str, Any]:
    block = make(NORMS[norm])
    grads_of(block)
    return grads_of(block, calls=1)


def test_instance_norm():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv1d(2, 2, 3), nn.InstanceNorm1d(2, track_running_stats=True))
    block = copy.deepcopy(plain)
    Checkpointed(block, keep_products=False)
    x = torch.randn(4, 2, 8)
    for module in (plain, block):
        module(x).square().sum().backward()
    assert torch.equal(block[1].running_mean, plain[1].running_mean)
    assert torch.equal(block[0].weight.grad, plain[0].weight.grad)


def test_backward_twice_through_one_graph():
    block, plain = make(NORMS["in place"]), make(NORMS["in place"])
    Checkpointed(block, keep_products=False)
    for module in (plain, block):
        torch.manual_seed(1)
        loss = module(torch.randn(8, WIDTH)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert torch.equal(block.up.weight.grad, plain.up.weight.grad)


def test_a_buffer_that_changes_in_some_calls():
    block = make(Counting(in_place=True))
    Checkpointed(block, keep_products=False)
    block.norm.moves = False
    grads_of(block)
    block.norm.moves = True
    with pytest.raises(
        InputError, match=r"Block changes its buffer norm.factor in some calls and not in others.*leave"
    ):
        block(torch.randn(8, WIDTH))


def test_modules_train_as_they_did_in_the_forward():
    expected = grads_of(make())
    block = make()
    Checkpointed(block, keep_products=False)
    assert_equal(grads_of(block, before_backward=block.eval), expected)
    assert not block.training
    assert not block.drop.training


def test_a_frozen_norm_keeps_its_statistics():
    """One that does not train reads them, in both computations."""
    block, plain = make(NORMS["batch"]), make(NORMS["batch"])
    Checkpointed(block, keep_products=False)
    block.norm.eval()
    plain.norm.eval()
    assert_equal(grads_of(block), grads_of(plain))
    assert block.norm.num_batches_tracked == 0


@pytest.mark.parametrize("keep_products", [False, True])
def test_keywords_are_kept_for_backward_like_other_arguments(keep_products):
    """torch itself saves none of them, and does not look there for the device of random numbers."""
    grads = []
    for module in (make(), make()):
        scale = torch.full((WIDTH,), 2.0, requires_grad=True)
        if grads:
            Checkpointed(module, keep_products)
        grads.append(grads_of(module, scale=scale) | {"scale": scale.grad})
    assert_equal(grads[1], grads[0])
    block = make()
    Checkpointed(block, keep_products)
    large = torch.randn(1000, 1)
    x = torch.randn(8, WIDTH)
    if not keep_products:
        assert saved_bytes(lambda: block(x, scale=large[0])) == large.nbytes + x.nbytes


def test_casts_are_those_of_the_forward():
    """Of a scope of the user's within the engine's, too, when backward runs outside of both."""
    grads = []
    for module in (make(), make()):
        if grads:
            Checkpointed(module, keep_products=False)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
            with torch.autocast("cpu", enabled=False):
                y = module(y.float())
        y.float().sum().backward()
        grads.append({name: param.grad for name, param in module.named_parameters()})
    assert_equal(grads[1], grads[0])


def test_only_while_training_with_gradients():
    block = make(NORMS["batch"])
    Checkpointed(block, keep_products=False)
    x = torch.randn(8, WIDTH)
    whole = saved_bytes(lambda: make()(x))
    assert saved_bytes(lambda: block(x)) == x.nbytes
    with torch.no_grad():
        assert not block(x).requires_grad
    block.eval()
    assert saved_bytes(lambda: block(x)) > x.nbytes
    assert whole > 10 * x.nbytes


def test_selective_keeps_products_and_no_more():
    kept: list[str] = []
    policy = recompute._policy

    def watch(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        decision = policy(context, op, *args, **kwargs)
        if decision == CheckpointPolicy.MUST_SAVE and not context.is_recompute:  # before 2.15 it asks again
            kept.append(str(op))
        return decision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "_policy", watch)
        block = make()
        Checkpointed(block, keep_products=True)
        grads_of(block, calls=1)
    assert kept == ["aten.addmm.default"] * 2


def test_attention_is_kept_unless_it_drops():
    """What is not computed again draws no random numbers, and those after it would be others."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention.default
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    q = torch.zeros(1)
    save, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    assert recompute._policy(None, attend, q, q, q) == save
    assert recompute._policy(None, attend, q, q, q, 0.0, True) == save
    assert recompute._policy(None, attend, q, q, q, 0.1, True) == again
    assert recompute._policy(None, efficient, q, q, q, None, True) == save
    assert recompute._policy(None, efficient, q, q, q, None, True, 0.1) == again
    assert recompute._policy(None, attend, q, q, q, dropout_p=0.1) == again
    assert recompute._policy(None, torch.ops.aten.gelu.default, q) == again
    for op in recompute._attentions():
        assert recompute._policy(None, op, q, q, q) == save


def test_the_module_stays_what_it_is():
    block = make()
    before = list(vars(block)), list(block.state_dict()), [name for name, _ in block.named_modules()]
    signature = inspect.signature(block.forward)
    seen = []
    block.register_forward_pre_hook(lambda *_: seen.append("before"))
    block.register_forward_hook(lambda *_: seen.append("after"))
    block.register_full_backward_hook(lambda *_: seen.append("backward"))
    forward = Checkpointed(block, keep_products=False)
    assert (type(block), inspect.signature(block.forward)) == (Block, signature)
    grads_of(block, calls=1)
    assert seen == ["before", "after", "backward"]
    assert (list(block.state_dict()), [name for name, _ in block.named_modules()]) == before[1:]
    forward.remove()
    assert list(vars(block)) == before[0]


class Copied(Block):
    pass


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))])
def test_copies_compute_by_themselves(duplicate):
    torch.manual_seed(0)
    block = Copied()
    Checkpointed(block, keep_products=True)
    clone = duplicate(block)
    again = duplicate(clone)
    for other in (clone, again):
        assert other.forward.__self__ is other
        nn.init.zeros_(other.down.weight)
        nn.init.zeros_(other.down.bias)
        x = torch.randn(2, WIDTH)
        assert torch.equal(other(x), x)
        assert not torch.equal(block(x), x)


def own_forward(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sin().sin()


def test_a_forward_of_the_users_own():
    block = make()
    block.forward = own_forward
    forward = Checkpointed(block, keep_products=False)
    x = torch.randn(2, WIDTH, requires_grad=True)
    assert saved_bytes(lambda: block(x)) == x.nbytes
    assert torch.equal(block(x), own_forward(x))
    assert copy.deepcopy(block).forward is own_forward
    forward.remove()
    assert block.forward is own_forward


class Caching(nn.Linear):
    def forward(self, x: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
        return super().forward(x)


def test_a_cache_is_refused():
    block = Caching(2, 2)
    Checkpointed(block, keep_products=False)
    block(torch.zeros(2), past_key_values=None)
    with pytest.raises(InputError, match=r"Caching was called with past_key_values.*twice.*use_cache=False"):
        block(torch.zeros(2), past_key_values=[])
    with torch.no_grad():
        block(torch.zeros(2), past_key_values=[])
    block.eval()(torch.zeros(2), past_key_values=[])
