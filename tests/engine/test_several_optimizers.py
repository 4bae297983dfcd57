"""A list of optimizers over disjoint parameters is one update, in every precision; one over another is one, too."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lr

import halfmesh
from halfmesh.errors import InputError
from tests.support.models import FP16_NAIVE, FP16_TORCH, MLP, difference, full_weights, make_data, step_on
from tests.support.models import make_engine as make_any
from tests.support.optimizers import lookahead, muon_and_adamw, sgd_and_adamw
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

X, Y = make_data(16)
UPDATES = 3
MODES = {"none": ({}, 1e-5), "fp16": (FP16_TORCH, 1e-2), "masters": (FP16_NAIVE, 1e-2)}


def halving(optimizer: optim.Optimizer) -> Any:
    return lr.StepLR(optimizer, 1, gamma=0.5)


def start(optimizers: Any = sgd_and_adamw, config: Any = None, **options: Any) -> Any:
    return make_any({"clip_grad_norm": 0.5, **(config or {})}, optimizer=optimizers, **options)


def train(engine: Any, updates: Any = range(UPDATES)) -> list[float]:
    """Returns the norm of each update."""
    size, norms = len(X) // engine.context.dp_size, []
    own = slice(engine.context.dp_rank * size, (engine.context.dp_rank + 1) * size)
    for update in updates:
        engine.zero_grad()
        norms.append(float(step_on(engine, X.roll(update, 0)[own], Y.roll(update, 0)[own]).grad_norm))
    return norms


def by_hand(make: Any) -> tuple[nn.Module, list[float]]:
    """The loop that people write: clipped over all, each with a scheduler."""
    model, norms = MLP(), []
    optimizers = make(model.parameters())
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    schedulers = list(map(halving, optimizers))
    for update in range(UPDATES):
        model.zero_grad()
        nn.functional.cross_entropy(model(X.roll(update, 0)), Y.roll(update, 0)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        for each in (*optimizers, *schedulers):
            each.step()
    return model, norms


@pytest.mark.promise("several models (GANs), several optimizers")
@pytest.mark.parametrize(("make", "mode"), [*((sgd_and_adamw, mode) for mode in MODES), (muon_and_adamw, "none")])
def test_two_optimizers_train_as_in_a_plain_loop(make, mode):
    config, tolerance = MODES[mode]
    engine = start(make, config, lr_scheduler=halving)
    norms = train(engine)
    expected, plain_norms = by_hand(make)
    assert norms == pytest.approx(plain_norms, rel=tolerance)
    assert difference(full_weights(engine), expected) <= tolerance
    first, second = engine.optimizer.parts
    _ = engine.lr_scheduler  # settles
    rates = [first.param_groups[0]["lr"], second.param_groups[0]["lr"]]
    assert rates == pytest.approx([(0.02 if make is muon_and_adamw else 0.05) / 8, 0.01 / 8])
    state = [value for values in engine.optimizer.state.values() for value in values.values()]
    held = sum(value.numel() * value.element_size() for value in state if value.dim())
    assert engine.plan.values["bytes"]["optimizer"] == held


def test_the_optimizers_that_were_given_stay_usable():
    model = MLP()
    given = sgd_and_adamw(model.parameters())
    engine = start(given, model=model)
    assert list(engine.optimizer.parts) == given
    assert [id(group) for group in engine.optimizer.param_groups] == [id(one.param_groups[0]) for one in given]
    train(engine, [0])
    assert set(engine.optimizer.state) == {p for one in given for p in one.state}
    for step in (given[1].step, engine.optimizer.step):
        with pytest.raises(InputError, match=r"optimizer.step\(\) was called outside the engine"):
            step()
    engine.close()
    assert list(start(engine.optimizer, model=model).optimizer.parts) == given


def test_convert_to_amp_takes_a_list():
    expected, norms = by_hand(sgd_and_adamw)
    model = here(MLP())
    given = sgd_and_adamw(model.parameters())
    model, optimizer, loss = halfmesh.convert_to_amp(
        model, given, nn.functional.cross_entropy, "apex", {"opt_level": "O0"}
    )
    schedulers = list(map(halving, given))
    for update in range(UPDATES):
        x, y = here((X.roll(update, 0), Y.roll(update, 0)))
        optimizer.backward(loss(model(x), y))
        assert optimizer.clip_grad_norm(0.5).item() == pytest.approx(norms[update], rel=1e-5)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert difference(model.state_dict(), expected) <= 1e-6


@pytest.mark.parametrize("mode", ["none", "masters"])
def test_an_optimizer_over_another_is_one(mode, tmp_path):
    """In a loop, through a checkpoint, and given back."""
    config, tolerance = MODES[mode]
    expected, norms = by_hand(lookahead)
    engine, again = (start(lookahead, config, lr_scheduler=halving) for _ in range(2))
    assert train(engine, range(UPDATES - 1)) == pytest.approx(norms[:-1], rel=tolerance)
    engine.save(tmp_path)
    again.load(tmp_path)
    for each in (engine, again):
        train(each, [UPDATES - 1])
        assert difference(full_weights(each), expected) <= tolerance
        assert {group["lookahead_step"] for group in each.optimizer.param_groups} == {UPDATES}
        with pytest.raises(InputError, match=r"optimizer.step\(\) was called outside the engine"):
            each.optimizer.step()
        each.close()
        held = {id(param) for group in each.optimizer.param_groups for param in group["params"]}
        assert held == set(map(id, each.model.parameters())) == set(map(id, each.optimizer._base_optimizer.state))


def test_what_cannot_be_joined_is_told():
    model = MLP()
    twice = [optim.SGD(model.parameters(), lr=0.1), optim.AdamW([model.norm.weight], lr=0.1)]
    other = [optim.SGD(model.parameters(), lr=0.1), optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1)]
    for optimizers, words in [
        (twice, "several optimizers would step norm.weight; give each parameter to one"),
        (other, r"it holds 1 parameter that the model does not have"),
        ([twice[0], lambda params: None], "but got a list"),
    ]:
        with pytest.raises(InputError, match=words):
            start(optimizers, model=model)


def make_warmup(optimizer: optim.Optimizer) -> Any:
    return halfmesh.LinearWarmupLR(optimizer, warmup_steps=2, total_steps=9)


@pytest.mark.parametrize(
    ("make", "alone"),
    [
        (lambda first, second: halving, [halving, halving]),
        (lambda first, second: [make_warmup, halving], [make_warmup, halving]),
        (lambda first, second: [halving(first), make_warmup(second)], [halving, make_warmup]),
        (lambda first, second: halving(second), [None, halving]),
    ],
)
def test_schedulers_are_one_each_or_a_list(make, alone):
    model = MLP()
    optimizers, twins = (sgd_and_adamw(model.parameters()) for _ in range(2))
    engine = start(optimizers, lr_scheduler=make(*optimizers), model=model)
    schedulers = [make(twin) for make, twin in zip(alone, twins, strict=True) if make]
    for update in range(UPDATES):
        train(engine, [update])
        for scheduler in schedulers:
            scheduler.optimizer.step()
            scheduler.step()
    held = engine.lr_scheduler  # settles
    assert [group["lr"] for group in engine.optimizer.param_groups] == [t.param_groups[0]["lr"] for t in twins]
    assert list(map(type, held if isinstance(held, list) else [held])) == list(map(type, schedulers))


def test_a_state_dict_resumes_exactly_and_has_the_form_of_one_optimizers():
    engine, again = (start(config=FP16_NAIVE, lr_scheduler=halving) for _ in range(2))
    train(engine)
    saved, state = copy.deepcopy((engine.state_dict(), engine.optimizer.state_dict()))
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    assert set(state["state"]) == set(numbers) == set(range(len(list(engine.model.parameters()))))
    again.load_state_dict(saved)
    for each in (engine, again):
        train(each, [5, 6])
    torch.testing.assert_close(full_weights(again), full_weights(engine), rtol=0, atol=0)
    joined = again.optimizer
    joined.load_state_dict(state)
    torch.testing.assert_close(joined.state_dict()["state"], state["state"], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"other parameter groups"):
        joined.load_state_dict(optim.SGD(again.model.parameters(), lr=0.1).state_dict())


REAL, NOISE = (torch.randn(8, size, generator=torch.Generator().manual_seed(size)) for size in (6, 4))
bce = nn.functional.binary_cross_entropy_with_logits
GAN_MODES = {"none": {}, "naive": FP16_NAIVE}


def make_models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(n, 16), nn.GELU(), nn.Linear(16, m)) for n, m in ((4, 6), (6, 1))]


def gan_sgd(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.5)


def gan_by_hand() -> list[dict[str, torch.Tensor]]:
    generator, discriminator = models = make_models()
    steps = [gan_sgd(model.parameters()) for model in models]
    ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)
    for _ in range(4):
        fake = generator(NOISE)
        steps[1].zero_grad()
        (bce(discriminator(REAL), ones) + bce(discriminator(fake.detach()), zeros)).backward()
        steps[1].step()
        steps[0].zero_grad()
        bce(discriminator(fake), ones).backward()
        steps[0].step()
    return [dict(model.state_dict()) for model in models]


def through_engines(rank: int, world_size: int) -> dict[tuple[str, str], list[dict[str, torch.Tensor]]]:
    """As docs/several-models.md has it."""
    found = {}
    size = 8 // world_size
    real, noise = (here(x[rank * size : (rank + 1) * size]) for x in (REAL, NOISE))
    ones, zeros = here((torch.ones(size, 1), torch.zeros(size, 1)))
    for mode in GAN_MODES:
        for data in ("replicate", "zero1") if world_size > 1 else ("replicate",):
            models = make_models()
            config = {**GAN_MODES[mode], "parallel": {"data": data}}
            generator, discriminator = engines = [
                halfmesh.initialize(model, gan_sgd, bce, None, {**config, "name": name}, device=rank_device())
                for model, name in zip(models, ("generator", "discriminator"), strict=True)
            ]
            for _ in range(4):
                fake = generator(noise)
                on_fake = discriminator.criterion(discriminator(fake.detach()), zeros)
                discriminator.backward(discriminator.criterion(discriminator(real), ones) + on_fake)
                discriminator.step()
                discriminator.model.requires_grad_(False)
                generator.backward(generator.criterion(discriminator(fake), ones))
                generator.step()
                discriminator.model.requires_grad_(True)
            found[mode, data] = [close_whole(engine) for engine in engines]
    return found


@pytest.mark.promise(
    "several models (GANs), several optimizers",
    "an engine for each model; one update",
    of="PyTorch",
    page="several-models.md",
)
@pytest.mark.distributed
def test_a_gan_trains_as_by_hand():
    expected = gan_by_hand()
    for found in (through_engines(0, 1), *run_ranks(through_engines, 2)):
        for (mode, data), weights in found.items():
            tolerance = 1e-6 if mode == "none" else 1e-3
            torch.testing.assert_close(weights, expected, rtol=tolerance, atol=tolerance, msg=f"{mode}, {data}")


def test_checkpoints_in_one_folder(tmp_path):
    """The models have the same names and shapes."""
    engines = []
    for config in ({"name": "first"}, {"name": "second"}, {}):
        engines.append(halfmesh.initialize(nn.Linear(4, 1), gan_sgd, bce, None, config, device="cpu"))
        engines[-1].backward(engines[-1].criterion(engines[-1](NOISE), torch.ones(8, 1)))
        engines[-1].step()
    first, second, unnamed = engines
    places = [engine.save(tmp_path, keep=1) for engine in (first, second)]
    assert all(place.exists() for place in places), "none takes the place of the other's"
    with pytest.raises(InputError, match="engine 'second' saved it, but this is 'first'"):
        first.load(tmp_path)
    first.load(places[0])
    unnamed.load(places[1])


@pytest.mark.parametrize(("config", "closes"), [({}, True), (FP16_NAIVE, True), ({"profile_ranges": True}, False)])
def test_an_engine_is_freed_at_once(config, closes):
    """Also where garbage is not collected: what it holds (masters, process groups) would stay, one engine's after
    the other's."""
    held = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):  # what the first one imports keeps its callers' frames for a while
            model = make_models()[0]
            engine = halfmesh.initialize(model, gan_sgd, bce, None, config, device="cpu")
            engine.backward(engine.criterion(engine(NOISE), torch.ones(8, 6)))
            engine.step()
            kept = engine, engine._executor, *[engine.context, engine.optimizer] * closes
            held = [weakref.ref(each) for each in kept]
            if closes:
                engine.close()
            del engine, model, kept
        assert {ref() for ref in held} == {None}
    finally:
        gc.enable()
