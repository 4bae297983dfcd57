"""A list of optimizers over disjoint parameters is one update, in every precision and layout that each allows."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.optim import lr_scheduler as lr

import halfmesh
from halfmesh.errors import InputError
from tests.support.nano_gpt import CONTEXT, GPT, PLAN, WORDS
from tests.support.ranks import here, rank_device, run_ranks

ORTHOGONALISED_IN_BF16 = 2e-3
"""Muon rounds to bf16, which makes more of a last bit that differs."""
MODES = {
    "none": ({}, 1e-6),
    "torch_fp16": ({"fp16": {"mode": "torch", "init_scale": 256.0}}, 2e-2),
    "torch_bf16": ({"bf16": {"mode": "torch"}}, 5e-2),
    "naive_fp16": ({"fp16": {"mode": "naive", "initial_scale": 256.0}}, 2e-2),
    "naive_bf16": ({"bf16": {"mode": "naive"}}, 5e-2),
    "apex_o0": ({"fp16": {"mode": "apex", "opt_level": "O0"}}, 1e-6),
    "apex_o1": ({"fp16": {"mode": "apex", "opt_level": "O1", "max_loss_scale": 256.0}}, 2e-2),
    "apex_o2": ({"fp16": {"mode": "apex", "opt_level": "O2", "max_loss_scale": 256.0}}, 2e-2),
    "apex_o3": ({"fp16": {"mode": "apex", "opt_level": "O3"}}, 2e-2),  # of a loop in half precision
    "torch_fp8": ({"fp8": {"mode": "torch"}}, 2e-1),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicate": (2, {}),
    "zero1": (2, {"data": "zero1"}),
    "fsdp": (2, {"data": "fsdp"}),
    "tensor": (2, {"tensor": {"size": 2, "plan": PLAN}}),
    "pipeline": (2, {"pipeline": {"size": 2, "microbatches": 2, "partition": ["transformer.h.1"]}}),
}
UPDATES = 3


def make_gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(n_layer=2)


def split(params: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of the blocks, and the rest."""
    params = list(params)
    matrices = [p for p in params if p.dim() == 2 and WORDS not in p.shape and CONTEXT not in p.shape]
    return matrices, [p for p in params if not any(p is matrix for matrix in matrices)]


def muon_and_adamw(params: Any) -> list[optim.Optimizer]:
    matrices, others = split(params)
    return [optim.Muon(matrices, lr=0.02), optim.AdamW(others, lr=0.01, eps=1e-4)]


def sgd_and_adamw(params: Any) -> list[optim.Optimizer]:
    matrices, others = split(params)
    return [optim.SGD(matrices, lr=0.05, momentum=0.9), optim.AdamW(others, lr=0.01, eps=1e-4)]


def lookahead(params: Any) -> list[optim.Optimizer]:
    """timm's, over AdamW: every second step goes half of the way back."""
    inner = optim.AdamW(list(params), lr=0.01, eps=1e-4)
    return [pytest.importorskip("timm.optim").Lookahead(inner, alpha=0.5, k=2)]


BOTH = {"muon": muon_and_adamw, "sgd": sgd_and_adamw, "lookahead": lookahead}


def halving(optimizer: optim.Optimizer) -> Any:
    return lr.StepLR(optimizer, 1, gamma=0.5)


def data(update: int, rank: int = 0, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(update)
    ids = torch.randint(WORDS, (8, CONTEXT + 1), generator=generator)[rank::ranks]
    return here((ids[:, :-1], ids[:, 1:]))


def criterion(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def start(make: Any = sgd_and_adamw, config: Any = None, model: Any = None, **options: Any) -> Any:
    model = make_gpt() if model is None else model
    config = {"clip_grad_norm": 0.5, **(config or {})}
    return halfmesh.initialize(
        model, make(model.parameters()), criterion, None, config, device=rank_device(), **options
    )


def train(engine: Any, updates: Any = range(UPDATES)) -> list[Any]:
    """Returns the norm of each update."""
    context, norms = engine.context, []
    for update in updates:
        x, y = data(update, context.dp_rank, context.dp_size)
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        norms.append(engine.step().grad_norm)
    return norms


def plain(make: Any, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[float]]:
    """The loop that people write: clipped over both, each with a scheduler."""
    model = here(make_gpt()).to(dtype)
    optimizers = make(model.parameters())
    schedulers, norms = list(map(halving, optimizers)), []
    for update in range(UPDATES):
        x, y = data(update)
        model.zero_grad()
        criterion(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        for each in (*optimizers, *schedulers):
            each.step()
    return model, norms


def gap(weights: Any, model: nn.Module) -> float:
    """The largest difference of a weight, relative to the largest weight."""
    expected = {name: value.cpu() for name, value in model.state_dict().items() if value.is_floating_point()}
    largest = max(value.abs().max() for value in expected.values())
    return max(float((weights[n].cpu() - value).abs().max() / largest) for n, value in expected.items())


# -- one update ------------------------------------------------------------------------------------------------------


@pytest.mark.promise(
    "several optimizers for one model (Muon and AdamW)",
    "one update, as in a plain loop; saved and resharded",
    of="PyTorch",
    page="loop.md",
)
@pytest.mark.parametrize("which", ["sgd", "muon"])
@pytest.mark.parametrize("mode", MODES)
def test_two_optimizers_train_as_in_a_plain_loop(mode, which):
    config, tolerance = MODES[mode]
    engine = start(BOTH[which], config, lr_scheduler=halving)
    norms = train(engine)
    expected, plain_norms = plain(BOTH[which], torch.float16 if mode == "apex_o3" else torch.float32)
    tolerance = max(tolerance, ORTHOGONALISED_IN_BF16 if which == "muon" else 0)
    assert norms == pytest.approx(plain_norms, rel=max(tolerance, 1e-5))
    assert gap(engine.full_state_dict(), expected) <= tolerance
    first, adamw = engine.optimizer.parts
    _ = engine.lr_scheduler  # settles
    rates = [first.param_groups[0]["lr"], adamw.param_groups[0]["lr"]]
    assert rates == pytest.approx([(0.02 if which == "muon" else 0.05) / 8, 0.01 / 8])
    engine.close()
    before = [p.clone() for p in engine.model.parameters()]
    first.step()  # belongs to the user again
    assert all(map(torch.equal, before, engine.model.parameters()))


def test_the_plan_names_each_and_knows_its_bytes():
    engine = start(muon_and_adamw)
    assert "Muon (not fused) and AdamW (fused by fused='auto'), clip norm 0.5" in str(engine.plan)
    train(engine)
    state = [value for values in engine.optimizer.state.values() for value in values.values()]
    held = sum(value.numel() * value.element_size() for value in state if value.dim())
    assert engine.plan.values["bytes"]["optimizer"] == held


def test_an_overflow_skips_both_and_moves_neither_scheduler():
    config = {"fp16": {"mode": "naive", "initial_scale": 256.0, "hysteresis": 1}}
    engine = start(config=config, lr_scheduler=halving)
    train(engine)
    before = {name: value.clone() for name, value in engine.full_state_dict().items()}
    x, y = data(9)
    engine.backward(engine.criterion(engine(x), y) * float("inf"))
    assert engine.step().skipped
    assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
    assert engine.loss_scale == 128.0
    assert [s.last_epoch for s in engine.lr_scheduler] == [UPDATES, UPDATES]


def test_fused_ones_step_without_a_host_read():
    fused = "(fused by fused='auto', no host read)"
    assert f"SGD {fused} and AdamW {fused}" in str(start(config=MODES["naive_fp16"][0]).plan)


def test_each_is_stepped_in_its_own_implementation():
    engine = start(muon_and_adamw)
    muon, adamw = engine.optimizer.parts
    assert adamw.param_groups[0]["fused"] is True
    assert "fused" not in muon.param_groups[0]
    engine.close()
    assert adamw.param_groups[0]["fused"] is None


def test_the_optimizers_that_were_given_stay_usable():
    model = make_gpt()
    given = sgd_and_adamw(model.parameters())
    engine = start(lambda _: given, model=model)
    assert list(engine.optimizer.parts) == given
    assert [id(group) for group in engine.optimizer.param_groups] == [id(one.param_groups[0]) for one in given]
    calls = []
    engine.optimizer.register_step_post_hook(lambda part, *_: calls.append(part))
    train(engine, range(1))
    assert calls == given
    assert set(engine.optimizer.state) == {p for one in given for p in one.state}
    assert len(list(engine.master_params())) == len(list(model.parameters()))
    with pytest.raises(InputError, match=r"optimizer.step\(\) was called outside the engine"):
        given[1].step()
    with pytest.raises(InputError, match=r"optimizer.step\(\) was called outside the engine"):
        engine.optimizer.step()
    with pytest.raises(InputError, match=r"engine.optimizer.parts\[0\].add_param_group"):
        engine.optimizer.add_param_group({"params": []})
    for group in given[1].param_groups:
        group["lr"] = 0.0
    norm = engine.model.transformer["ln_f"].weight.clone()
    train(engine, range(1))
    assert torch.equal(norm, engine.model.transformer["ln_f"].weight)
    engine.close()
    again = halfmesh.initialize(model, engine.optimizer, criterion, config={}, device=rank_device())
    assert list(again.optimizer.parts) == given


def test_its_state_and_copies_are_as_of_one_optimizer():
    engine = start()
    joined, (first, second) = engine.optimizer, engine.optimizer.parts
    param, other = (part.param_groups[0]["params"][0] for part in (first, second))
    assert param not in joined.state
    assert joined.state.get(param) is None
    assert joined.state[param] == {}
    assert joined.state.setdefault(other, {"step": 3}) == {"step": 3} == second.state[other]
    del joined.state[other]
    with pytest.raises(KeyError, match="none of the optimizers holds"):
        joined.state[torch.ones(1)] = {}
    train(engine)
    for copied in (copy.deepcopy(joined), pickle.loads(pickle.dumps(joined))):
        assert list(map(type, copied.parts)) == [type(first), type(second)]
        assert copied.state_dict()["param_groups"] == joined.state_dict()["param_groups"]
        torch.testing.assert_close(copied.state_dict()["state"], joined.state_dict()["state"], rtol=0, atol=0)


def test_a_group_that_is_added_to_one_is_trained():
    model, late = make_gpt(), "transformer.ln_f.weight"
    optimizers = sgd_and_adamw(p for name, p in model.named_parameters() if name != late)
    engine = start(lambda _: optimizers, {"bf16": {"mode": "naive"}}, model=model)
    assert "1 trainable parameter left out" in str(engine.plan)
    before = engine.full_state_dict()[late].clone()
    train(engine, range(1))
    assert torch.equal(engine.full_state_dict()[late], before)
    optimizers[1].add_param_group({"params": [engine.model.get_parameter(late)]})
    train(engine, range(1))
    assert not torch.equal(engine.full_state_dict()[late], before)


@pytest.mark.parametrize("make", [sgd_and_adamw, muon_and_adamw])
def test_a_group_added_to_the_first_leaves_those_of_the_second(make):
    """The second's were made fused, and are given back."""
    model = make_gpt()
    late = model.transformer["h"][1].mlp.c_fc.weight
    first, second = make(p for p in model.parameters() if p is not late)
    engine = start(lambda _: [first, second], model=model)
    assert second.param_groups[0]["fused"] is True
    first.add_param_group({"params": [late]})
    before = late.detach().clone()
    train(engine, range(1))
    assert not torch.equal(late, before)
    engine.close()
    assert second.param_groups[0]["fused"] is None


def test_convert_to_amp_takes_a_list():
    expected, norms = plain(sgd_and_adamw)
    model = here(make_gpt())
    given = sgd_and_adamw(model.parameters())
    model, optimizer, loss = halfmesh.convert_to_amp(model, given, criterion, "apex", {"opt_level": "O0"})
    schedulers = list(map(halving, given))
    for update in range(UPDATES):
        x, y = data(update)
        optimizer.backward(loss(model(x), y))
        assert optimizer.clip_grad_norm(0.5).item() == pytest.approx(norms[update], rel=1e-5)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert gap(model.state_dict(), expected) <= 1e-6


@pytest.mark.parametrize("mode", ["none", "naive_fp16", "apex_o2"])
def test_an_optimizer_over_another_is_one(mode, tmp_path):
    """In a loop, through a checkpoint, and given back."""
    config, tolerance = MODES[mode]
    expected, norms = plain(lookahead)
    model = make_gpt()
    (optimizer,) = lookahead(model.parameters())
    engine = start(lambda _: optimizer, config, model=model, lr_scheduler=halving)
    assert train(engine, range(UPDATES - 1)) == pytest.approx(norms[:-1], rel=max(tolerance, 1e-5))
    engine.save(tmp_path)
    again = start(lookahead, config, lr_scheduler=halving)
    again.load(tmp_path)
    for each in (engine, again):
        train(each, range(UPDATES - 1, UPDATES))
        assert gap(each.full_state_dict(), expected) <= tolerance
        assert {group["lookahead_step"] for group in each.optimizer.param_groups} == {UPDATES}
    with pytest.raises(InputError, match=r"optimizer.step\(\) was called outside the engine"):
        optimizer.step()
    for each in (engine, again):
        each.close()
        given_back = each.optimizer
        held = {id(param) for group in given_back.param_groups for param in group["params"]}
        assert held == set(map(id, each.model.parameters())) == set(map(id, given_back._base_optimizer.state))


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_joined_is_told():
    model = make_gpt()
    weight = model.transformer["ln_f"].weight
    twice = [optim.SGD(model.parameters(), lr=0.1), optim.AdamW([weight], lr=0.1)]
    other = [optim.SGD(model.parameters(), lr=0.1), optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1)]
    for optimizers, words in [
        (twice, "several optimizers would step transformer.ln_f.weight; give each parameter to one"),
        (other, r"it holds 1 parameter not of the model"),
        ([twice[0], lambda params: None], r"but a list of \[SGD, function\] was given"),
        ([], r"but a list of \[\] was given"),
    ]:
        with pytest.raises(InputError, match=words):
            start(lambda _, given=optimizers: given, model=model)
        with pytest.raises(InputError, match=words):
            halfmesh.initialize(model, lambda _, given=optimizers: given, criterion, config={})
    assert not twice[0]._optimizer_step_pre_hooks


# -- schedulers --------------------------------------------------------------------------------------------------------


def make_warmup(optimizer: optim.Optimizer) -> Any:
    return halfmesh.LinearWarmupLR(optimizer, warmup_steps=2, total_steps=9)


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        (halving, [lr.StepLR, lr.StepLR]),
        ([make_warmup, halving], [halfmesh.LinearWarmupLR, lr.StepLR]),
        ([None, halving], [lr.StepLR]),
        ("built", [lr.StepLR, halfmesh.LinearWarmupLR]),
        ("of one", lr.StepLR),
    ],
)
def test_schedulers_are_one_each_or_a_list(given, kinds):
    model = make_gpt()
    optimizers, twins = (sgd_and_adamw(model.parameters()) for _ in range(2))

    def make(given: Any, of: Any) -> Any:
        if given == "built":
            return [halving(of[0]), make_warmup(of[1])]
        if given == "of one":
            return halving(of[1])
        return given

    expected = make(given, twins)
    if callable(expected):
        expected = [expected(twin) for twin in twins]
    expected = expected if isinstance(expected, list) else [expected]
    expected = [s(t) if callable(s) else s for s, t in zip(expected, twins, strict=len(expected) == 2)]
    engine = start(lambda _: optimizers, lr_scheduler=make(given, optimizers), model=model)
    for update in range(UPDATES):
        train(engine, [update])
        for scheduler in expected:
            if scheduler is not None:
                scheduler.optimizer.step()
                scheduler.step()
    _ = engine.lr_scheduler  # settles
    assert [group["lr"] for group in engine.optimizer.param_groups] == [t.param_groups[0]["lr"] for t in twins]
    held = engine.lr_scheduler
    assert (list(map(type, held)) if isinstance(held, list) else type(held)) == kinds


def test_schedulers_that_do_not_fit_are_told():
    with pytest.raises(InputError, match=r"a list of 1 was given for 2 optimizers"):
        start(lr_scheduler=[halving])
    other = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(InputError, match=r"lr_scheduler: it was built on another optimizer"):
        start(lr_scheduler=[halving(other)])
    with pytest.raises(InputError, match=r"ReduceLROnPlateau.step needs a metric"):
        start(lr_scheduler=lr.ReduceLROnPlateau)
    engine = start(lr_scheduler=halving)
    train(engine, range(1))
    engine.lr_scheduler[1].step()
    with pytest.raises(InputError, match=r"its last_epoch was 1 and is 2"):
        train(engine, range(1))


# -- layouts -----------------------------------------------------------------------------------------------------------


def trained(rank: int, world_size: int, layout: str, which: str, mode: str, folder: str) -> Any:
    """Norms and weights; then those after a resume from the last update but one."""
    config = {**MODES[mode][0], "parallel": LAYOUTS[layout][1]}
    engine = start(BOTH[which], config, lr_scheduler=halving)
    norms = train(engine, range(UPDATES - 1))
    engine.save(folder)
    norms += train(engine, range(UPDATES - 1, UPDATES))
    weights = engine.full_state_dict(rank0_only=False)
    engine.close()
    again = start(BOTH[which], config, lr_scheduler=halving)
    again.load(folder)
    train(again, range(UPDATES - 1, UPDATES))
    resumed = again.full_state_dict(rank0_only=False)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    return norms, weights


@pytest.mark.promise("several optimizers for one model (Muon and AdamW)")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "which", "mode"),
    [
        *((layout, "sgd", "none") for layout in LAYOUTS),
        *((layout, "sgd", "naive_fp16") for layout in ("zero1", "fsdp", "pipeline")),
        *((layout, "muon", "none") for layout in ("replicate", "pipeline")),
        ("replicate", "muon", "naive_bf16"),
        *((layout, "lookahead", "none") for layout in LAYOUTS),
        ("fsdp", "lookahead", "naive_fp16"),
    ],
)
def test_layouts_train_as_a_plain_loop_and_resume(layout, which, mode, tmp_path):
    expected, norms = plain(BOTH[which])
    tolerance = max(MODES[mode][1], ORTHOGONALISED_IN_BF16 if which == "muon" else 2e-6)
    for found, weights in run_ranks(trained, LAYOUTS[layout][0], layout, which, mode, str(tmp_path)):
        assert found == pytest.approx(norms, rel=max(tolerance, 1e-5))
        assert gap(weights, expected) <= tolerance


def one_stage_without(rank: int, world_size: int) -> list[int]:
    """The parameters of each optimizer on this rank: the first stage has none of the second's."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    first, last = (list(model[part].parameters()) for part in (slice(0, 2), slice(2, 4)))
    config = {"parallel": {"pipeline": {"size": 2, "microbatches": 2, "partition": ["2"]}}}
    optimizers = [optim.SGD(first, lr=0.1, momentum=0.9), optim.AdamW(last, lr=0.1)]
    engine = halfmesh.initialize(model, optimizers, nn.functional.mse_loss, config=config, device=rank_device())
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    for _ in range(2):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(here(torch.ones(4, 4))), here(torch.zeros(4, 4))))
        engine.step()
    assert not any(torch.equal(before[name], p) for name, p in engine.model.named_parameters())
    return [sum(len(group["params"]) for group in part.param_groups) for part in engine.optimizer.parts]


@pytest.mark.distributed
def test_a_stage_may_hold_no_parameter_of_one():
    assert run_ranks(one_stage_without, 2) == [[4, 0], [0, 4]]


# -- state -------------------------------------------------------------------------------------------------------------


def from_one(rank: int, world_size: int, layout: str, folder: str) -> Any:
    config = {"clip_grad_norm": 0.5, "parallel": LAYOUTS[layout][1]}
    engine = halfmesh.initialize(  # model and list by functions
        make_gpt, sgd_and_adamw, criterion, None, config, device=rank_device(), lr_scheduler=halving
    )
    train(engine, range(7, 8))  # a state of its own, to be overwritten
    engine.load(folder)
    train(engine, range(UPDATES - 1, UPDATES))
    return engine.full_state_dict(optimizer=True, rank0_only=False)


@pytest.mark.promise("several optimizers for one model (Muon and AdamW)")
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["zero1", "fsdp", "tensor", "pipeline"])
def test_state_is_resharded_by_parameter(layout, tmp_path):
    engine = start(lr_scheduler=halving)
    train(engine, range(UPDATES - 1))
    engine.save(tmp_path)
    train(engine, range(UPDATES - 1, UPDATES))
    expected = engine.full_state_dict(optimizer=True)["optimizer"]["state"]
    plain_model, _ = plain(sgd_and_adamw)
    for found in run_ranks(from_one, 2, layout, str(tmp_path)):
        assert gap(found["model"], plain_model) <= 2e-6
        state = found["optimizer"]["state"]
        assert state.keys() == expected.keys()
        for name, values in expected.items():
            assert state[name].keys() == values.keys()
            for key, value in values.items():
                torch.testing.assert_close(state[name][key], value, rtol=1e-4, atol=1e-6)


def test_the_whole_state_loads_into_plain_optimizers():
    engine = start()
    train(engine)
    full = engine.full_state_dict(optimizer=True)
    model = make_gpt()
    optimizers = sgd_and_adamw(model.parameters())
    model.load_state_dict(full["model"])
    set_optimizer_state_dict(model, optimizers, full["optimizer"])
    train(engine, range(UPDATES, UPDATES + 1))
    x, y = data(UPDATES)
    model = here(model)
    criterion(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for optimizer in optimizers:
        optimizer.step()
    assert gap(engine.full_state_dict(), model) <= 1e-6


@pytest.mark.parametrize("mode", ["none", "naive_fp16"])
def test_a_state_dict_resumes_exactly(mode):
    engine = start(config=MODES[mode][0], lr_scheduler=halving)
    train(engine)
    saved = torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, engine.state_dict())
    train(engine, range(5, 7))
    again = start(config=MODES[mode][0], lr_scheduler=halving)
    again.load_state_dict(saved)
    train(again, range(5, 7))
    one, other = engine.full_state_dict(), again.full_state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [g["lr"] for g in engine.optimizer.param_groups] == [g["lr"] for g in again.optimizer.param_groups]


def test_a_joined_state_dict_has_the_form_of_one_optimizers():
    model, twin = make_gpt(), make_gpt()
    engine = start(model=model)
    train(engine)
    state = engine.optimizer.state_dict()
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    assert numbers == list(range(len(list(model.parameters()))))
    assert set(state["state"]) == set(numbers)
    joined = start(model=twin).optimizer
    joined.load_state_dict(state)
    for one, other in zip(engine.optimizer.parts, joined.parts, strict=True):
        for a, b in zip(one.state.values(), other.state.values(), strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[key], b[key]) for key in a)
    with pytest.raises(ValueError, match=r"other parameter groups"):
        joined.load_state_dict(optim.SGD(twin.parameters(), lr=0.1).state_dict())


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path):
    engine = start()
    train(engine)
    engine.save(tmp_path)
    other = start(lambda params: list(reversed(sgd_and_adamw(params))))
    words = "torch.optim.sgd.SGD and torch.optim.adamw.AdamW, and this is torch.optim.adamw.AdamW and torch.optim.sgd"
    with pytest.raises(InputError, match=re.escape(words)):
        other.load(tmp_path)
