"""Two engines in one process: a GAN trains as by hand, and messages and checkpoints say whose they are."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.errors import InputError, NonFiniteError
from tests.support.models import FP16_NAIVE, FP16_TORCH
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

REAL, NOISE = (torch.randn(8, size, generator=torch.Generator().manual_seed(size)) for size in (6, 4))
bce = nn.functional.binary_cross_entropy_with_logits
MODES = {"none": {}, "torch": FP16_TORCH, "naive": FP16_NAIVE}


def make_models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(n, 16), nn.GELU(), nn.Linear(16, m)) for n, m in ((4, 6), (6, 1))]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def by_hand() -> list[dict[str, torch.Tensor]]:
    generator, discriminator = models = make_models()
    steps = [sgd(model) for model in models]
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
    for mode in MODES:
        for data in ("replicate", "zero1") if world_size > 1 else ("replicate",):
            models = make_models()
            config = {**MODES[mode], "parallel": {"data": data}}
            generator, discriminator = engines = [
                halfmesh.initialize(model, sgd(model), bce, None, {**config, "name": name}, device=rank_device())
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
    expected = by_hand()
    for found in (through_engines(0, 1), *run_ranks(through_engines, 2)):
        for (mode, data), weights in found.items():
            tolerance = 1e-6 if mode == "none" else 1e-3
            torch.testing.assert_close(weights, expected, rtol=tolerance, atol=tolerance, msg=f"{mode}, {data}")


def on_one_model(engines: bool) -> dict[str, torch.Tensor]:
    """Two optimizers, each with a loss of its own, of all of a model."""
    model = make_models()[0]
    each: list[Any] = [sgd(part) for part in (model[0], model[2])]
    if engines:
        each = [halfmesh.initialize(model, optimizer, config={}, device="cpu") for optimizer in each]
    for _ in range(2):
        for one in each:
            one.zero_grad()
            loss = model(NOISE).square().mean()
            one.backward(loss) if engines else loss.backward()
        for one in each:
            one.step()
    return model.state_dict()


def test_two_engines_on_one_model_do_not_clear_each_others_gradients():
    torch.testing.assert_close(on_one_model(engines=True), on_one_model(engines=False))


def linear(name: str | None, **config: Any) -> halfmesh.Engine:
    model = nn.Linear(4, 1)
    config |= {} if name is None else {"name": name}
    return halfmesh.initialize(model, sgd(model), bce, None, config, device="cpu")


def step(engine: halfmesh.Engine, x: torch.Tensor = NOISE) -> None:
    engine.backward(engine.criterion(engine(x), torch.ones(8, 1)))
    engine.step()


def test_messages_have_the_name(caplog):
    scaled = {"fp16": {"mode": "naive", "initial_scale": 256.0, "hysteresis": 1, "verbose": True}}
    engines = [linear("first", **scaled), linear("second", **scaled), linear(None, **scaled)]
    assert [str(engine.plan).splitlines()[0] for engine in engines] == [
        "halfmesh: resolved configuration of first",
        "halfmesh: resolved configuration of second",
        "halfmesh: resolved configuration",
    ]
    assert repr(engines[0]).startswith("Engine of Linear, after 0 updates\n  precision:  mode naive, compute float16")
    for engine in engines:
        step(engine, NOISE * torch.inf)
    said = [record.getMessage() for record in caplog.records if "loss scale" in record.getMessage()]
    said = [message for message in said if "->" in message]
    assert said == [f"{name}loss scale 256 -> 128; gradients with inf or nan" for name in ("first: ", "second: ", "")]
    with pytest.raises(NonFiniteError) as raised:
        step(linear("third", on_nonfinite="raise"), NOISE * torch.inf)
    assert "in the engine named 'third'" in raised.value.__notes__


def test_checkpoints_in_one_folder(tmp_path):
    """The models have the same names and shapes."""
    first, second = linear("first"), linear("second")
    for engine in (first, second):
        step(engine)
    places = [engine.save(tmp_path, keep=1) for engine in (first, second)]
    assert all(place.exists() for place in places), "none takes the place of the other's"
    with pytest.raises(InputError, match="the engine 'second' saved it, but this engine is 'first'"):
        first.load(tmp_path)
    first.load(places[0])
    linear(None).load(places[1])


@pytest.mark.parametrize("mode", MODES)
def test_a_closed_engine_is_freed_at_once(mode):
    """Also where garbage is not collected: what it holds (masters, process groups) would stay, one engine's after
    the other's."""
    held = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):  # what the first one imports keeps its callers' frames for a while
            model = make_models()[0]
            with halfmesh.initialize(model, sgd(model), bce, None, MODES[mode], device="cpu") as engine:
                engine.backward(engine.criterion(engine(NOISE), torch.ones(8, 6)))
                engine.step()
                held = [weakref.ref(each) for each in (engine, engine.context, engine.optimizer)]
            del engine, model
        assert [ref() for ref in held] == [None] * 3
    finally:
        gc.enable()


def norms(rank: int, world_size: int) -> list[float]:
    """Of a sharded weight, by collectives of its DTensor, in engines one after another; and, while the last one is
    there, on yet another layout."""
    found, engines = [], []
    tensor = {"tensor": {"size": 2, "plan": {"0": "colwise_gather"}}, "data": "fsdp"}
    for parallel in (tensor, {"data": "fsdp"}, {"data": {"strategy": "fsdp", "hybrid": 2}}) * 2:
        model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
        nn.init.ones_(model[2].weight)
        engine = halfmesh.initialize(model, sgd(model), bce, None, {"parallel": parallel}, device=rank_device())
        engines.append(engine)
        found += [engine.model[2].weight.detach().norm().full_tensor().item() for engine in engines]
        if len(engines) == 2:
            engines.pop(0).close()
    return found


@pytest.mark.distributed
def test_engines_on_several_layouts_have_groups_of_their_own():
    """The process group is the user's, here the test's, so that torch's tables outlive the first engine."""
    assert run_ranks(norms, 4) == [[4.0] * 11] * 4
