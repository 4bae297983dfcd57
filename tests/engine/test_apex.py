"""Mode APEX through the engine: O2's BatchNorm rule, casts of nested inputs, losses with scales of their own."""

import copy
import gc
import logging
import math
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfmesh
from halfmesh.errors import IncompatibleConfigError, InputError
from tests.support.models import MLP, make_data, make_engine, sgd
from tests.support.ranks import run_ranks

HALF, FULL = torch.float16, torch.float32


def apex(opt_level, **keys):
    return {"fp16": {"mode": "apex", "opt_level": opt_level, **keys}}


class Norms(nn.Module):
    """Every kind of normalisation that apex's rule tells apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(4, 4, 1)
        self.affine = nn.BatchNorm1d(4)
        self.plain = nn.BatchNorm1d(4, affine=False)
        self.sync = nn.SyncBatchNorm(4)
        self.instance = nn.InstanceNorm1d(4, affine=True)
        self.layer = nn.LayerNorm(6)
        self.register_buffer("offset", torch.full((6,), 0.1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.seen = x.dtype
        x = self.affine(self.conv(x))
        self.between = x.dtype
        return self.layer(self.instance(self.plain(x))) + self.offset


def dtypes(model):
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}


STAYS = {f"{norm}.{name}" for norm in ("affine", "sync") for name in ("weight", "bias", "running_mean", "running_var")}


@pytest.mark.parametrize(
    ("config", "stays"),
    [
        (apex("O2"), STAYS),
        (apex("O3", keep_batchnorm_fp32=True), STAYS),
        (apex("O2", keep_batchnorm_fp32="False"), set()),
        (apex("O3"), set()),
        (apex("O0"), None),
        (apex("O1"), None),
    ],
    ids=["O2", "O3 but them", "O2 with them", "O3", "O0", "O1"],
)
def test_batchnorm_rule(config, stays):
    """BatchNorm with weights stays in fp32, statistics included; without weights it is cast, as are other norms."""
    model = Norms()
    buffers = [name for name, _ in model.named_buffers()]
    engine = make_engine(config, model=model, criterion=None)
    expected = {name: FULL if stays is None or name in stays else HALF for name in dtypes(model)}
    assert dtypes(model) == expected
    assert [name for name, _ in model.named_buffers()] == buffers
    held = {id(p) for p in engine.master_params()}
    masters = engine._update.holdings.masters
    if "O2" in str(config):  # what is fp32 already is stepped itself
        assert {p.dtype for p in engine.master_params()} == {FULL}
        assert {name for name, p in model.named_parameters() if id(p) in held} == {
            n for n in stays if "running" not in n
        }
        assert len(masters) + len(stays) / 2 == len(held)
    else:
        assert not masters
        assert held == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("config", [apex("O2"), apex("O3", keep_batchnorm_fp32=True)], ids=str)
def test_batchnorm_trains_and_evaluates_in_fp32(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 4))
    reference = copy.deepcopy(model)
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.extend((args[0].dtype, output.dtype)))
    engine = make_engine(config, model=model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    x, y = torch.randn(8, 4, 6), torch.arange(8) % 4
    for _ in range(3):
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(x), y).backward()
        optimizer.step()
    assert set(seen) == {HALF}  # fp16 in, fp16 out, fp32 within
    torch.testing.assert_close(model[1].state_dict(), reference[1].state_dict(), rtol=2e-3, atol=2e-3)
    assert model[1].weight.half().float().ne(model[1].weight).any()  # fp32 that fp16 could not hold
    engine.eval()
    reference.eval()
    torch.testing.assert_close(engine(x), reference(x), rtol=5e-3, atol=5e-3)


Pair = namedtuple("Pair", "left right")


class Nest(nn.Module):
    """Takes and returns containers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch, *, pair, words):
        x = batch["x"][0]
        self.seen = [x.dtype, batch["ids"].dtype, pair.left.dtype, pair.right.dtype, words]
        y = self.linear(x)
        return {"y": [y, (y, batch["ids"])], "pair": Pair(y, words)}


@pytest.mark.parametrize(
    ("config", "inside", "outside"),
    [
        (apex("O0"), FULL, FULL),
        (apex("O2"), HALF, FULL),
        (apex("O3"), HALF, FULL),
        (apex("O3", cast_model_outputs="float16"), HALF, HALF),
        (apex("O1", cast_model_outputs="float32"), None, FULL),
    ],
    ids=str,
)
def test_nested_inputs_and_outputs_are_cast(config, inside, outside):
    engine = make_engine(config, model=Nest(), criterion=None)
    x = torch.randn(2, 4, dtype=torch.float64 if inside else FULL)
    ids = torch.arange(2)
    output = engine({"x": [x], "ids": ids}, pair=Pair(x.float(), ids), words="as they are")
    assert engine.model.seen == [inside or FULL, torch.int64, inside or FULL, torch.int64, "as they are"]
    assert isinstance(output["pair"], Pair)
    assert (output["pair"].left.dtype, output["pair"].right) == (outside, "as they are")
    assert (output["y"][0].dtype, output["y"][1][0].dtype, output["y"][1][1].dtype) == (outside, outside, torch.int64)


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_state_dicts_hold_no_half(opt_level):
    model = Norms()
    before = copy.deepcopy(model.state_dict())
    engine = make_engine(apex(opt_level), model=model, criterion=None)
    for state in (engine.model.state_dict(), engine.state_dict()["model"], model.layer.state_dict()):
        assert not [name for name, value in state.items() if value.dtype == HALF]
    if opt_level == "O2":  # the masters: full precision, not fp16 in fp32's clothes
        torch.testing.assert_close(model.state_dict()["conv.weight"], before["conv.weight"], rtol=0, atol=0)
    elif opt_level == "O3":
        torch.testing.assert_close(
            model.state_dict()["conv.weight"], before["conv.weight"].half().float(), rtol=0, atol=0
        )
    model.load_state_dict(before)
    assert list(model.state_dict()) == list(before)
    engine.close()
    assert dtypes(model) == {name: value.dtype for name, value in before.items() if value.is_floating_point()}
    assert not model._state_dict_hooks


def test_a_copy_of_the_model_saves_full_precision_too():
    engine = make_engine(apex("O2"))
    average = copy.deepcopy(engine.model)
    assert average.first.weight.dtype == HALF
    assert {value.dtype for value in average.state_dict().values()} == {FULL}
    with torch.no_grad():
        engine.model.first.weight.add_(1)
    assert not torch.equal(average.state_dict()["first.weight"], engine.model.state_dict()["first.weight"])


def test_half_models_are_refused_where_batchnorm_stays():
    with pytest.raises(InputError, match="and BatchNorm stays in float32; build the model in float32"):
        make_engine(apex("O2"), model=MLP().half())
    with pytest.raises(InputError, match="keeps parameters in float32 and casts while it computes"):
        make_engine(apex("O1"), model=MLP().half())
    with pytest.raises(InputError, match="mode='apex' computes in float32; build the model in float32"):
        make_engine(apex("O0"), model=MLP().half())
    assert make_engine(apex("O3"), model=MLP().half()).model.first.weight.dtype == HALF


def test_compiled_models_are_refused_under_o1():
    part = MLP()
    part.last = torch.compile(part.last, backend="eager")
    for model in (torch.compile(MLP(), backend="eager"), part):
        with pytest.raises(InputError, match="it is compiled, and O1's casts do not reach into compiled code"):
            make_engine(apex("O1"), model=model)
        make_engine(apex("O2"), model=model)


def test_o3_learns_with_its_dtypes():
    engine = make_engine(apex("O3", loss_scale=128.0))
    x, y = make_data()
    losses = []
    for _ in range(20):
        loss = engine.criterion(engine(x), y)
        engine.backward(loss)
        assert {p.grad.dtype for p in engine.model.parameters()} == {HALF}
        assert engine.step().loss_scale == 128.0
        losses.append(loss.item())
    assert {p.dtype for p in engine.master_params()} == {HALF}
    assert losses[-1] < 0.6 * losses[0]


def test_static_scales_never_skip():
    engine = make_engine(apex("O1", loss_scale=8.0))
    x, y = make_data(8)
    for factor in (1.0, math.inf):
        engine.backward(engine.criterion(engine(x), y) * factor)
        assert not engine.step().skipped
    assert engine.loss_scale == 8.0
    assert not engine.model.first.weight.isfinite().all()


def test_master_params_have_no_gradients_before_the_step():
    engine = make_engine(apex("O2"))
    assert {p.dtype for p in engine.master_params()} == {FULL}
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    with pytest.raises(InputError, match=r"where masters have no gradients yet; to clip set clip_grad_norm, or call"):
        engine.master_params()
    engine.step()
    assert len(list(engine.master_params())) == len(list(engine.model.parameters()))


def test_casts_are_o1s_alone():
    engine = make_engine(apex("O1"))
    x = torch.randn(2, 8)
    with engine.autocast():
        assert torch.einsum("ij,kj->ik", x, x).dtype == FULL
        engine.casts.register_half_function(torch, "einsum")
        assert torch.einsum("ij,kj->ik", x, x).dtype == HALF
        with engine.autocast(enabled=False):  # apex's disable_casts
            assert torch.einsum("ij,kj->ik", x, x).dtype == FULL
    with make_engine(apex("O1")).autocast():  # another engine has lists of its own
        assert torch.einsum("ij,kj->ik", x, x).dtype == FULL
    for config in (apex("O2"), apex("O1", patch_torch_functions=False), {"fp16": {"mode": "torch"}}, {}):
        other = make_engine(config)
        with pytest.raises(InputError, match="only mode='apex' with opt_level='O1' does"):
            other.casts  # noqa: B018
        with other.autocast(), other.autocast(enabled=False):
            assert (x @ x.T).dtype == FULL


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_the_models_own_computes_the_same_twice(reentrant):
    """Under O1 what is computed again in backward has to be cast again."""

    class Saving(MLP):
        saves = False

        def block(self, x):
            return self.last(nn.functional.gelu(self.tied(self.norm(x))))

        def forward(self, x):
            x = self.first(x)
            return checkpoint(self.block, x, use_reentrant=reentrant) if self.saves else self.block(x)

    grads = []
    for saves in (False, True):
        model = Saving()
        model.saves = saves
        engine = make_engine(apex("O1", loss_scale=128.0), model=model)
        x, y = make_data(8)
        engine.backward(engine.criterion(engine(x), y))
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_the_scope_of_a_loop_does_not_outlive_a_step():
    """Weights that were cast before a step are not used after it, also in one scope around the whole loop."""
    results = []
    for around in (False, True):
        engine = make_engine(apex("O1", loss_scale=128.0))
        x, y = make_data(8)
        with engine.autocast(enabled=True) if around else torch.enable_grad():
            for _ in range(3):
                engine.backward(engine.criterion(engine.model(x) if around else engine(x), y))
                engine.step()
        results.append(engine.state_dict()["model"])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("verbosity", "lines"), [(0, []), (1, ["loss scale 65536 -> 32768; gradients with inf or nan"])]
)
def test_verbosity(verbosity, lines, caplog):
    engine = make_engine(apex("O2", verbosity=verbosity))
    x, y = make_data(8)
    with caplog.at_level(logging.INFO, "halfmesh.amp"):
        caplog.clear()
        for factor in (1.0, math.inf, 1.0):
            engine.backward(engine.criterion(engine(x), y) * factor)
            engine.step()
        state = engine.state_dict()
        other = make_engine(apex("O2", verbosity=verbosity))  # a scale that is loaded was not lowered by a step
        other.load_state_dict(state)
        other.backward(other.criterion(other(x), y))
        other.step()
    told = [record.getMessage() for record in caplog.records if record.name.startswith("halfmesh.amp")]
    assert told == lines


def test_cast_weights_are_freed_after_backward():
    """Also in a scope of the user's around the whole loop, which would keep them."""
    engine = make_engine(apex("O1"))
    x, y = make_data(8)
    shapes = {p.shape for p in engine.model.parameters() if p.dim() == 2}

    def find_casts():
        gc.collect()
        halves = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype == HALF]
        return {id(t) for t in halves if t.shape in shapes}

    before = find_casts()
    with engine.autocast():
        loss = engine.criterion(engine.model(x), y)
        assert len(find_casts() - before) >= 3
        engine.backward(loss)
        del loss
        assert not find_casts() - before


# --- losses ---------------------------------------------------------------------------------------------------------


def test_unknown_losses_are_refused():
    engine = make_engine(apex("O2", num_losses=2))
    x, y = make_data(8)
    for wrong in (2, -1, "0", 1.0, True):
        with pytest.raises(InputError, match=r"loss_id=.* is not one of the num_losses=2 losses; allowed: 0 to 1"):
            engine.backward(engine.criterion(engine(x), y), loss_id=wrong)
    engine.backward(engine.criterion(engine(x), y), loss_id=1)
    assert not engine.step().skipped


def test_a_state_with_other_losses_is_refused():
    engine, other = make_engine(apex("O2", num_losses=2)), make_engine(apex("O2"))
    with pytest.raises(InputError, match="saved with 2 loss scales, but this run trains with a loss scale"):
        other.load_state_dict(engine.state_dict())
    with pytest.raises(InputError, match=r"saved with a loss scale, but this run trains with 2 \(num_losses\)"):
        engine.load_state_dict(other.state_dict())


def test_a_sum_that_overflows_is_every_losses_fault():
    """Two finite gradients whose sum is not: the step is skipped, and both scales are lowered."""
    engine = make_engine(apex("O0", loss_scale="dynamic", num_losses=2, max_loss_scale=1.5, min_loss_scale=1.0))
    for loss_id in (0, 1):
        engine.backward(engine.model.last.bias.sum() * 2e38, loss_id=loss_id)
    assert engine.step().skipped
    assert engine.loss_scales == (1.0, 1.0)


def losses_on_ranks(rank, world_size):
    """Two losses over two ranks; in the second update one of them overflows on the last rank alone."""
    results = {}
    for opt_level in ("O0", "O1", "O2"):
        config = apex(opt_level, loss_scale="dynamic", num_losses=2, max_loss_scale=64.0)
        engine = make_engine(config | {"gradient_accumulation": 2, "clip_grad_norm": 0.7}, criterion=None)
        x, y = make_data(16 * world_size)
        exact = []
        for update in range(4):
            for micro in range(2):
                part = slice(8 * (micro * world_size + rank), 8 * (micro * world_size + rank) + 8)
                out = engine(x[part])
                with engine.autocast(enabled=False):
                    out = out.float()
                    first, second = nn.functional.cross_entropy(out, y[part]), out.square().mean()
                bad = update == 1 and micro == 0 and rank == world_size - 1
                engine.backward(first, loss_id=0, retain_graph=True)
                engine.backward(second * (math.inf if bad else 1.0), loss_id=1)
                result = engine.step()
            exact.append((result.skipped, str(result.grad_norm), engine.loss_scales))
        results[opt_level] = exact, engine.state_dict()["model"]
        engine.close()
    return results


@pytest.mark.distributed
def test_losses_over_data_ranks():
    alone = losses_on_ranks(0, 1)
    results = run_ranks(losses_on_ranks, 2, timeout=120)
    model, (x, y) = MLP(), make_data(32)
    optimizer = sgd(model.parameters())
    for update in range(4):
        optimizer.zero_grad()
        out = model(x)
        (nn.functional.cross_entropy(out, y) + out.square().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        if update != 1:
            optimizer.step()
    expected = model.state_dict()
    for opt_level, (exact, weights) in results[0].items():
        assert results[1][opt_level][0] == exact
        torch.testing.assert_close(results[1][opt_level][1], weights, rtol=0, atol=0)
        assert [(skipped, scales) for skipped, _, scales in exact] == [
            (False, (64.0, 64.0)),
            (True, (64.0, 32.0)),
            (False, (64.0, 32.0)),
            (False, (64.0, 32.0)),
        ]
        assert [scales for _, _, scales in alone[opt_level][0]] == [scales for _, _, scales in exact]
        largest = max(value.abs().max() for value in expected.values())
        tolerance = {"O0": 1e-5, "O1": 2e-4, "O2": 4e-4}[opt_level]
        assert max((weights[n] - expected[n]).abs().max() for n in expected) / largest < tolerance


@pytest.mark.parametrize(("parallel", "cell"), [({"tensor": 1, "data": "zero1"}, "zero1"), ({"data": "fsdp"}, "fsdp")])
def test_refused_before_anything_runs(parallel, cell):
    model = MLP()
    with pytest.raises(IncompatibleConfigError) as error:
        halfmesh.initialize(model, sgd, None, None, apex("O2") | {"parallel": parallel}, device="cpu")
    message = str(error.value)
    assert f"apex fp16 x {cell}: apex's contract has no verdict shared by all ranks" in message
    assert "use mode='naive' (the same as O2 with keep_batchnorm_fp32=False) or mode='torch' (close to O1)" in message
    assert model.first.weight.dtype == FULL
    assert not torch.distributed.is_initialized()
