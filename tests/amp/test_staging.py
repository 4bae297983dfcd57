"""The memory of masters' gradients: the same for each part of an update, laid out as the masters are."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn, optim

from halfmesh import torch_private
from halfmesh.amp import stepper
from halfmesh.amp.convert import convert
from halfmesh.amp.parts import Parts
from halfmesh.amp.recipe import FP32, Recipe
from halfmesh.amp.staging import Staging
from halfmesh.errors import NonFiniteError
from halfmesh.shard import ParamShard
from tests.support.updates import OPTIMIZERS, give, gradients, make_params, make_update

BF16 = Recipe(torch.bfloat16, torch.bfloat16, False, True)


def test_pieces_have_the_forms_of_their_targets():
    targets = [torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(3, 2).t(), torch.zeros(())]
    staging = Staging()
    pieces = staging.views(targets)
    assert [p.shape for p in pieces] == [t.shape for t in targets]
    assert [p.stride() for p in pieces] == [t.stride() for t in targets]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert [p.unique().tolist() for p in pieces] == [[0.0], [1.0], [2.0]], "none lies in another"


def test_views_share_the_memory_of_the_largest():
    staging = Staging()
    small, large = [torch.zeros(3)], [torch.zeros(5), torch.zeros(2)]
    place = staging.views(large)[0].data_ptr()
    assert staging.views(small)[0].data_ptr() == place
    assert staging.views([torch.zeros(4, dtype=torch.float64)])[0].dtype == torch.float64


def make_parts(sizes):
    """What cuts the gradients of an update with masters, and that update, whose gradients are there."""
    params = [nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in sizes]
    update = make_update(params, OPTIMIZERS["adamw"], BF16)
    give(params, params)
    return Parts(update.holdings), update


def test_parts_share_the_memory_of_the_largest_whatever_their_order():
    cutter, update = make_parts([3, 9, 4])
    small, large, middle = cutter.of(update.gradients(), False, 4)
    places = {part.memory[0].data_ptr() for part in (small, large, middle)}
    assert len(places) == 1
    assert large.memory[0].shape == (9,)


def test_a_part_of_several_dtypes_gets_memory_of_each():
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4, dtype=torch.float64))]
    update = make_update(params, OPTIMIZERS["adamw"], Recipe(torch.float32, None, False, False))
    for param in params:
        param.grad = torch.ones(8, dtype=param.dtype)[: 2 * param.numel() : 2]
    grads = update.gradients()
    (part,) = Parts(update.holdings).of(grads, False, 2**20)
    part.attach(grads.tensors)
    assert [target.grad.dtype for target in part.targets] == [torch.float32, torch.float64]
    assert all(bool((target.grad == 1).all()) for target in part.targets)


def test_how_gradients_are_cut_is_remembered():
    cutter, update = make_parts([3, 9, 4])
    first = cutter.of(update.gradients(), False, 4)
    for shard in update.holdings.trained:
        shard.param.grad = shard.param.grad.clone()
    assert cutter.of(update.gradients(), False, 4) is first


def to_fp32(shard, update):
    shard.main_grad, shard.param.grad = shard.param.grad.float(), None


def strided(shard, update):
    shard.param.grad = torch.zeros(18, dtype=torch.bfloat16)[::2]


def fewer(shard, update):
    shard.param.grad = None


def in_another_order(shard, update):
    update.holdings.stepped = update.holdings.stepped[::-1]


def laid_out_anew(shard, update):
    update.holdings.target(shard).data = torch.zeros(18)[::2]
    assert update.holdings.changed()
    update.holdings.refresh()


def hooked(shard, update):
    update.optimizer.register_step_post_hook(lambda *_: None)


@torch.no_grad()
@pytest.mark.parametrize("change", [to_fp32, strided, fewer, in_another_order, laid_out_anew, hooked])
def test_what_is_remembered_is_forgotten_when_something_changes(change):
    cutter, update = make_parts([3, 9, 4])
    first = cutter.of(update.gradients(), False, 4)
    change(update.holdings.trained[1], update)
    grads = update.gradients()
    parts = cutter.of(grads, False, 4)
    assert parts is not first
    with_one = [s for s in update.holdings.stepped if s.param.grad is not None or s.main_grad is not None]
    assert [shard for part in parts for shard in part.shards] == with_one
    assert len(parts) == (1 if change is hooked else len(with_one))  # hooks of the user's want one step
    taken = iter(grads.take())
    for part in parts:
        part.attach(part.convert([next(taken) for _ in part.shards]))
        assert all(target.grad.dtype == target.dtype for target in part.targets)
        assert all(target.grad.shape == target.shape for target in part.targets)


def lose_some(update, params, draw):
    for param in params:
        if draw() < 0.3:
            param.grad = None


def lay_out_gradients_anew(update, params, draw):
    for param in params:
        if param.grad is not None and param.dim() > 1 and draw() < 0.5:
            param.grad = param.grad.transpose(0, 1).contiguous().transpose(0, 1)


def sum_in_fp32(update, params, draw):
    for shard in update.holdings.trained:
        if shard.param.grad is not None and draw() < 0.5:
            shard.main_grad, shard.param.grad = shard.param.grad.float(), None


def write_into_the_model(update, params, draw):
    with torch.no_grad():
        params[0].mul_(0.5)


def load_what_it_is(update, params, draw):
    state = update.state_dict()
    update.load_state_dict({**state, "masters": {name: value.clone() for name, value in state["masters"].items()}})


def lay_out_masters_anew(update, params, draw):
    target = update.holdings.target(update.holdings.shards[0])
    target.data = target.data.t().contiguous().t() if target.is_contiguous() else target.data.contiguous()


def hook_once(update, params, draw):
    handle = update.optimizer.register_step_post_hook(lambda *_: handle.remove())


EVENTS = [lose_some, lay_out_gradients_anew, sum_in_fp32, write_into_the_model, load_what_it_is, lay_out_masters_anew]
EVENTS += [hook_once]


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum", "rmsprop"])
@pytest.mark.parametrize("limit", [60, 25 * 2**20])
@pytest.mark.parametrize("recipe", [BF16, FP32], ids=["bf16", "fp32"])
def test_what_is_remembered_changes_nothing(recipe, limit, name, monkeypatch):
    """Whatever happens between two updates: the same bits as where nothing is remembered."""
    monkeypatch.setattr(stepper, "STREAM_BYTES", limit)

    def run(seed, remembers):
        params = make_params()
        update = make_update(params, OPTIMIZERS[name], recipe)
        draw = random.Random(seed).random
        weights = []
        for step in range(12):
            if not remembers:
                update.stepper._parts = Parts(update.holdings)
            give(params, gradients(step))
            for event in EVENTS:
                if draw() < 0.2:
                    event(update, params, draw)
            update.step()
            weights += [param.detach().clone() for param in params]
        return weights + [update.holdings.target(shard).detach().clone() for shard in update.holdings.shards]

    for seed in range(8):
        for ours, theirs in zip(run(seed, True), run(seed, False), strict=True):
            assert torch.equal(ours, theirs)


def test_parameters_without_a_master_are_stepped_once(monkeypatch):
    """Of an update in several parts, each of which steps what has a gradient: O2 keeps BatchNorm in fp32."""
    recipe = Recipe(torch.float16, torch.float16, False, True, keep_batchnorm_fp32=True)
    results = []
    for limit in (1, 200, 25 * 2**20):
        monkeypatch.setattr(stepper, "STREAM_BYTES", limit)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
        shards = [ParamShard(name, param) for name, param in model.named_parameters()]
        update = convert(model, optim.AdamW(model.parameters(), lr=0.01), shards, recipe)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for shard in shards:
                shard.param.grad = torch.randn(shard.param.shape, generator=generator).to(shard.param.dtype)
            update.step()
        held = [update.holdings.target(shard) for shard in shards]
        assert {update.optimizer.state[target]["step"].item() for target in held} == {3.0}
        results.append([target.detach() for target in held])
    for ours in results[:2]:
        for a, b in zip(ours, results[2], strict=True):
            assert torch.equal(a, b)


def test_the_memory_stays_from_update_to_update(monkeypatch):
    """Of several parts, too."""
    for limit in (60, 25 * 2**20):
        monkeypatch.setattr(stepper, "STREAM_BYTES", limit)
        params = make_params()
        update = make_update(params, OPTIMIZERS["adamw"], BF16)
        places = []
        for step in range(4):
            give(params, gradients(step))
            update.step()
            places.append(update.stepper._parts._staging._flat.data_ptr())
            assert all(master.grad is None for master in update.holdings.masters.values())
        assert len(set(places[1:])) == 1
        assert update.stepper._parts._staging._flat.numel() * 4 <= max(limit, 35 * 4)


class Works:
    """The calls of torch that convert gradients and take their norms, by what they are given."""

    def __init__(self, monkeypatch):
        self.converted, self.normed = [], []
        copy, norm = torch_private.foreach_copy_, torch_private.foreach_norm

        def foreach_copy_(targets, sources):
            if targets[0].dtype == torch.float32:  # not the masters, into the model
                self.converted.append(len(sources))
            copy(targets, sources)

        def foreach_norm(tensors, *args):
            self.normed.append(tensors[0].dtype)
            return norm(tensors, *args)

        monkeypatch.setattr(torch_private, "foreach_copy_", foreach_copy_)
        monkeypatch.setattr(torch_private, "foreach_norm", foreach_norm)


def test_gradients_that_are_stepped_at_once_are_judged_in_fp32(monkeypatch):
    """They are converted once all the same, and what is stepped in several parts is judged as it is."""
    works, results = Works(monkeypatch), []
    for limit in (25 * 2**20, 60):
        monkeypatch.setattr(stepper, "STREAM_BYTES", limit)
        params = make_params()
        update = make_update(params, OPTIMIZERS["adamw"], BF16, max_norm=0.1)
        for step in range(3):
            give(params, gradients(step))
            if step == 1:
                update.clip_grad_norm_(0.2)  # judged before the step
            result = update.step()
        results.append(([target.detach() for target in update.holdings.masters.values()], result.grad_norm))
    assert works.converted == [3] * 3 + [1] * 9
    assert works.normed == [torch.float32, torch.bfloat16, torch.float32] + [torch.bfloat16] * 3
    for ours, theirs in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-6)


def test_gradients_that_lose_something_when_they_are_stepped_are_judged_as_they_are():
    """Added up in fp32 for parameters without masters."""
    params = [nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))]
    update = make_update(params, OPTIMIZERS["adamw"], Recipe(torch.bfloat16, torch.bfloat16), max_norm=1.0)
    update.holdings.trained[0].main_grad = torch.full((4,), 1.0 + 2**-10)
    assert update.step().grad_norm == 2.0 + 2**-9


def test_judged_at_once_with_other_gradients_each_time():
    params, apart = make_params(), make_params()
    update = make_update(params, OPTIMIZERS["adamw"], BF16, max_norm=0.1)
    same = make_update(apart, OPTIMIZERS["adamw"], BF16, max_norm=0.1)
    for step in range(6):
        for held in (params, apart):
            give(held, [None if step and place == step % 4 else grad for place, grad in enumerate(gradients(step))])
        converted = {shard.name: grad for shard, grad in update.stepper.convert(update.gradients())}
        assert converted.keys() == {f"p{place}" for place in range(3) if not step or place != step % 4}
        assert all(grad.dtype == torch.float32 for grad in converted.values())
        same.clip_grad_norm_(0.1)  # judged before the step, as they are
        assert update.step().grad_norm == pytest.approx(same.step().grad_norm, rel=1e-6)
    for ours, theirs in zip(update.holdings.masters.values(), same.holdings.masters.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_an_update_that_does_not_come_about_leaves_nothing_for_the_next(on_nonfinite):
    """What was converted for it is not stepped later."""
    results = []
    for bad in (True, False):
        params = make_params()
        update = make_update(params, OPTIMIZERS["adamw"], BF16, on_nonfinite=on_nonfinite)
        for step in range(4):
            if step == 2 and not bad:
                continue
            give(params, gradients(step))
            if step == 2:
                params[1].grad[0] = torch.inf
            with pytest.raises(NonFiniteError) if step == 2 and on_nonfinite == "raise" else nullcontext():
                update.step()
            update.zero_grad()
        results.append([target.detach() for target in update.holdings.masters.values()])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
