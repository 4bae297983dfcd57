"""engine.save_weights: files that plain torch, timm and transformers load; engine.load_weights takes theirs. Frozen
weights and buffers under NAIVE come out as they went in."""

from __future__ import annotations

import json

import pytest
import torch

import halfmesh
from halfmesh.errors import CheckpointError, InputError
from tests.composition.workloads import criterion, find_workload
from tests.support.checkpoint_runs import FP16, Net, differing, make_engine, make_small, train, weights, whole_state
from tests.support.models import MLP
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

safetensors = pytest.importorskip("safetensors.torch")
BOTH = {"tensor": 2, "pipeline": {"size": 2, "microbatches": 2}}
FROZEN = ("frozen.weight", "frozen.bias", "steps")


def trained(rank, world_size, model, mode, folder):
    """Saves the weights in both formats. What they are."""
    workload = find_workload(model)
    engine = halfmesh.initialize(
        workload.build(seed=rank),
        lambda params: torch.optim.SGD(params, lr=0.05),
        criterion,
        config={**FP16[mode], "parallel": BOTH if world_size == 4 else {"tensor": 2}},
        device=rank_device(),
    )
    x, y = here([tensor[:8] for tensor in workload.data()])
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    engine.save_weights(f"{folder}/weights.safetensors")
    engine.save_weights(f"{folder}/weights.pt", format="torch")
    engine.save_weights(f"{folder}/parts/model.safetensors", max_file_gb=4e-6)
    return close_whole(engine)


def read_by_transformers(folder, fresh):
    """From several files and their index."""
    from transformers import LlamaForCausalLM

    place = folder / "parts"
    fresh.config.save_pretrained(place)
    model = LlamaForCausalLM.from_pretrained(place)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    index = json.loads((place / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == len(list(place.glob("model-*-of-*.safetensors"))) > 3
    return model


@pytest.mark.distributed
@pytest.mark.sends
@pytest.mark.parametrize(
    ("ranks", "model", "mode"), [(2, "gpt", "torch"), pytest.param(4, "llama", "naive", marks=pytest.mark.slow)]
)
def test_plain_models_and_their_libraries_load_what_was_divided(ranks, model, mode, tmp_path):
    """By 2 or 2 x 2 ranks: fused and tied weights, buffers, masters in full precision."""
    expected = run_ranks(trained, ranks, model, mode, str(tmp_path), timeout=120)[0]
    pt = torch.load(tmp_path / "weights.pt", weights_only=True)
    for state in (safetensors.load_file(tmp_path / "weights.safetensors"), pt):
        find_workload(model).build(seed=9).load_state_dict(state)  # strict
        assert differing(state, expected) == []
    if model == "llama":
        read = read_by_transformers(tmp_path, find_workload(model).build(seed=9))
        assert differing(read.state_dict(), expected) == []


def loaded(rank, world_size, layouts, path):
    """The weights of engines that load them; and after a step before it and one after it."""
    found = {}
    for layout in layouts:
        engine = make_engine(layout, "naive", seed=7, optimizer=trainable_sgd)
        train(engine, 1)
        engine.load_weights(path)
        before = whole_state(engine, close=False)
        train(engine, 1)
        found[layout] = before, close_whole(engine)
    return found


def trainable_sgd(params):
    """Without the frozen layer: what is in the optimizer has a master."""
    return torch.optim.SGD([param for param in params if param.requires_grad], lr=1e-3)


@pytest.mark.promise("loading before wrapping; no full optimizer checkpoint under tensor parallelism")
@pytest.mark.distributed
@pytest.mark.sends
@pytest.mark.parametrize("name", ["weights.safetensors", "parts.safetensors"])
def test_weights_of_others_into_every_layout(name, tmp_path):
    """A file of safetensors, and one that is in parts. Training goes on from there, and leaves what is frozen as it
    was, to the bit."""
    expected, path = Net(seed=3).state_dict(), tmp_path / name
    expected["steps"] = torch.rand(3, generator=torch.Generator().manual_seed(1))  # more than half precision can show
    if name == "weights.safetensors":
        safetensors.save_file(expected, path)
    else:
        model = Net()
        model.load_state_dict(expected)
        make_engine("one", "none", model=model).save_weights(path, max_file_gb=2e-6)
        assert not path.exists()
    found = [loaded(0, 1, ["one"], path)]
    if name == "weights.safetensors":
        found += run_ranks(loaded, 2, ["zero1", "fsdp", "tp2", "pp2"], path, timeout=100)
    for layout, (before, after) in [pair for each in found for pair in each.items()]:
        assert differing({key: before[key] for key in expected}, expected) == [], layout
        moved = differing(after, expected)
        assert "head.weight" in moved
        assert not {*FROZEN} & {*moved}, layout
        assert max((after[key] - expected[key]).abs().max() for key in moved if "norm" not in key) < 0.05, layout


def made_net(factor=1.0):
    model = Net()
    model.steps.copy_(torch.rand(3, generator=torch.Generator().manual_seed(1)))
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point() and "running" not in name:
                value.mul_(factor)
    return model


def frozen_of(state):
    return {name: state[name] for name in FROZEN}


@pytest.mark.parametrize("load", ["load", "load_weights", "load_state_dict", "the model's load_state_dict"])
def test_frozen_values_come_out_as_they_went_in(load, tmp_path):
    """From files, checkpoints, state dicts and close."""
    expected = frozen_of(made_net().state_dict())
    engine = make_engine("one", "naive", model=made_net(), optimizer=trainable_sgd)
    train(engine, 2)
    engine.save(tmp_path / "saved")
    engine.save_weights(tmp_path / "w.pt", format="torch")
    whole = torch.load(tmp_path / "w.pt")
    assert differing(frozen_of(whole), expected) == []
    other = make_engine("one", "naive", model=made_net(1.7), optimizer=trainable_sgd)
    loads = {
        "load": lambda: other.load(tmp_path / "saved"),
        "load_weights": lambda: other.load_weights(tmp_path / "w.pt"),
        "load_state_dict": lambda: other.load_state_dict(engine.state_dict()),
    }
    loads.get(load, lambda: other.model.load_state_dict(whole))()
    train(other, 1)
    for each in (engine, other):
        assert differing(frozen_of(whole_state(each)), expected) == []
        assert differing(frozen_of(each.model.state_dict()), expected) == []


def test_tied_weights(tmp_path):
    """Under each of their names, so that strict loads find them; torch's own files keep the tie."""
    engine = make_engine("one", "naive", model=MLP())
    engine.save_weights(tmp_path / "w.safetensors")
    engine.save_weights(tmp_path / "w.pt", format="torch")
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    assert state["tied.weight"].data_ptr() == state["again.weight"].data_ptr()
    plain = safetensors.load_file(tmp_path / "w.safetensors")
    assert torch.equal(plain["tied.weight"], plain["again.weight"])
    del plain["again.weight"]  # as transformers does, which leaves one of them
    safetensors.save_file(plain, tmp_path / "one.safetensors")
    other = make_engine("one", "naive", model=MLP(seed=4))
    other.load_weights(tmp_path / "one.safetensors")
    assert differing(weights(other), state) == []


def test_an_earlier_save_is_not_loaded(tmp_path):
    path, index = tmp_path / "w.safetensors", tmp_path / "w.safetensors.index.json"
    for size, is_whole in ((1.0, True), (2e-6, False), (1.0, True)):
        make_small().save_weights(path, max_file_gb=size)
        assert (path.exists(), index.exists()) == (is_whole, not is_whole)


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (None, CheckpointError, r"there is no file .*, and no w\.pt\.index\.json; give the path that you gave save_w"),
        ({**Net().state_dict(), "more": torch.ones(2)}, InputError, r"does not fit .*:\n  - the model has no more"),
    ],
)
def test_files_and_formats_that_are_rejected(content, error, words, tmp_path):
    engine = make_small()
    before = weights(engine)
    if content is not None:
        torch.save(content, tmp_path / "w.pt")
    with pytest.raises(error, match=words):
        engine.load_weights(tmp_path / "w.pt")
    assert differing(weights(engine), before) == []
    with pytest.raises(InputError, match=r"format='safetensor' is not one of .*; did you mean 'safetensors'"):
        engine.save_weights(tmp_path / "w", format="safetensor")
