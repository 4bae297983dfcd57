"""engine.save_weights: files that plain torch, timm and transformers load; engine.load_weights takes theirs. Frozen
weights and buffers under NAIVE come out as they went in."""

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
    if model == "llama":  # from several files and their index
        from transformers import LlamaForCausalLM

        place = tmp_path / "parts"
        find_workload(model).build(seed=9).config.save_pretrained(place)
        read = LlamaForCausalLM.from_pretrained(place)
        assert read.lm_head.weight is read.model.embed_tokens.weight
        index = json.loads((place / "model.safetensors.index.json").read_text())["weight_map"]
        assert len(set(index.values())) == len(list(place.glob("model-*-of-*.safetensors"))) > 3
        assert differing(read.state_dict(), expected) == []


def made_net(seed):
    """With a buffer of more than half precision can show."""
    model = Net(seed=seed)
    model.steps.copy_(torch.rand(3, generator=torch.Generator().manual_seed(seed)))
    return model


def loaded(rank, world_size, layouts, path):
    """The weights of engines that load them after a step, and after another one, by layout."""
    found = {}
    for layout in layouts:
        engine = make_engine(layout, "naive", seed=7, optimizer=trainable_sgd)
        train(engine, 1)
        engine.load_weights(path)
        before = whole_state(engine, close=False)
        train(engine, 1)
        found[layout] = before, close_whole(engine)
    return found


def trainable_sgd(params):  # without the frozen layer: what is in the optimizer has a master
    return torch.optim.SGD([param for param in params if param.requires_grad], lr=1e-3)


@pytest.mark.promise("loading before wrapping; no full optimizer checkpoint under tensor parallelism")
@pytest.mark.distributed
@pytest.mark.sends
@pytest.mark.parametrize("name", ["weights.safetensors", "parts.safetensors"])
def test_weights_of_others_into_every_layout(name, tmp_path):
    """A file of safetensors, and one that is in parts. Training goes on from there, and leaves what is frozen as it
    was, to the bit."""
    model, path = made_net(3), tmp_path / name
    expected, found = model.state_dict(), []
    if name == "weights.safetensors":
        safetensors.save_file(expected, path)
        found = run_ranks(loaded, 2, ["zero1", "fsdp", "tp2", "pp2"], path, timeout=100)
    else:
        make_engine("one", "none", model=model).save_weights(path, max_file_gb=2e-6)
        assert not path.exists()
    found.append(loaded(0, 1, ["one"], path))
    for layout, (before, after) in [pair for each in found for pair in each.items()]:
        assert differing({key: before[key] for key in expected}, expected) == [], layout
        moved = differing(after, expected)
        assert "head.weight" in moved
        assert not {*FROZEN} & {*moved}, layout
        assert max((after[key] - expected[key]).abs().max() for key in moved if "norm" not in key) < 0.05, layout


@pytest.mark.parametrize("load", ["load", "load_weights", "load_state_dict", "the model's load_state_dict"])
def test_frozen_values_come_out_as_they_went_in(load, tmp_path):
    """From files, checkpoints, state dicts and close."""

    def assert_frozen(state):
        assert all(torch.equal(state[name], expected[name]) for name in FROZEN)

    expected = made_net(0).state_dict()
    engine = make_engine("one", "naive", model=made_net(0), optimizer=trainable_sgd)
    train(engine, 2)
    engine.save(tmp_path / "saved")
    engine.save_weights(tmp_path / "w.pt", format="torch")
    assert_frozen(whole := torch.load(tmp_path / "w.pt"))
    other = make_engine("one", "naive", model=made_net(5), optimizer=trainable_sgd)
    {
        "load": lambda: other.load(tmp_path / "saved"),
        "load_weights": lambda: other.load_weights(tmp_path / "w.pt"),
        "load_state_dict": lambda: other.load_state_dict(engine.state_dict()),
        "the model's load_state_dict": lambda: other.model.load_state_dict(whole),
    }[load]()
    train(other, 1)
    for each in (engine, other):
        assert_frozen(whole_state(each))
        assert_frozen(each.model.state_dict())


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
