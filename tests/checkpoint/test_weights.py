"""engine.save_weights: files that plain torch, timm and transformers load; engine.load_weights takes theirs."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.errors import CheckpointError, InputError
from tests.composition.workloads import criterion, find_workload
from tests.support.checkpoint_runs import (
    FP16,
    LAYOUTS,
    Net,
    differing,
    make_engine,
    make_small,
    train,
    weights,
    whole_state,
)
from tests.support.models import MLP
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

safetensors = pytest.importorskip("safetensors.torch")
BOTH = {"tensor": 2, "pipeline": {"size": 2, "microbatches": 2}}


def trained(rank, world_size, model, mode, folder):
    """Saves the weights in both formats. What they are."""
    workload = find_workload(model)
    engine = halfmesh.initialize(
        workload.build(seed=rank),
        lambda params: torch.optim.SGD(params, lr=0.05),
        criterion,
        config={**FP16[mode], "parallel": BOTH},
        device=rank_device(),
    )
    x, y = here([tensor[:8] for tensor in workload.data()])
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    engine.save_weights(f"{folder}/weights.safetensors")
    engine.save_weights(f"{folder}/weights.pt", format="torch")
    engine.save_weights(f"{folder}/parts/model.safetensors", max_file_gb=4e-6)
    return close_whole(engine)


def read_by_timm(folder, fresh):
    from timm.models import load_checkpoint

    load_checkpoint(fresh, str(folder / "weights.safetensors"))
    return fresh


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
    ("model", "mode", "library"),
    [
        ("gpt", "torch", None),
        pytest.param("vit", "naive", read_by_timm, marks=pytest.mark.slow),
        pytest.param("llama", "naive", read_by_transformers, marks=pytest.mark.slow),
    ],
)
def test_plain_models_and_their_libraries_load_what_was_divided(model, mode, library, tmp_path):
    """By 2 x 2 ranks: fused and tied weights, buffers, masters in full precision."""
    expected = run_ranks(trained, 4, model, mode, str(tmp_path), timeout=120)[0]
    for state in (
        safetensors.load_file(tmp_path / "weights.safetensors"),
        torch.load(tmp_path / "weights.pt", weights_only=True),
    ):
        fresh = find_workload(model).build(seed=9)
        fresh.load_state_dict(state)  # strict
        assert differing(state, expected) == []
        assert differing(fresh.state_dict(), expected) == []
    if library is not None:
        assert differing(library(tmp_path, find_workload(model).build(seed=9)).state_dict(), expected) == []


def loaded(rank, world_size, cells, path):
    """What weights engines have that load them, and whether they step from there."""
    found = {}
    for layout, mode in cells:
        engine = make_engine(layout, mode, seed=7)
        engine.load_weights(path)
        found[layout, mode] = whole_state(engine)
        engine = make_engine(layout, mode, seed=7, optimizer=lambda params: torch.optim.SGD(params, lr=1e-3))
        train(engine, 1)
        engine.load_weights(path)
        train(engine, 1)
        found[layout, mode, "stepped"] = close_whole(engine)
    return found


@pytest.mark.promise(
    "weights are not inherited; loading before wrapping; changed shapes",
    "lifted: weights carry over, whole state dicts load into every layout, frozen values come out as they went in",
    of="SageMaker",
    page="checkpoints.md",
)
@pytest.mark.distributed
@pytest.mark.sends
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("weights.safetensors", ("one", "zero1", "fsdp", "tp2", "pp2")),
        pytest.param("weights.pt", ("one", "fsdp", "tp2_fsdp2", "pp2_zero1"), marks=pytest.mark.slow),
        pytest.param("model.safetensors", ("one", "fsdp", "tp2_fsdp2", "pp2_zero1"), marks=pytest.mark.slow),
    ],
)
def test_weights_of_others_into_every_layout(name, layouts, tmp_path):
    """A file of plain torch, of safetensors, and one that is in parts."""
    expected, path = Net(seed=3).state_dict(), tmp_path / name
    if name == "weights.pt":
        torch.save(expected, path)
    elif name == "weights.safetensors":
        safetensors.save_file(expected, path)
    else:
        make_engine("one", "none", seed=3).save_weights(path, max_file_gb=2e-6)
        assert not path.exists()
    for ranks in sorted({LAYOUTS[layout][0] for layout in layouts}):
        cells = [(each, mode) for each in layouts for mode in ("none", "naive") if LAYOUTS[each][0] == ranks]
        results = [loaded(0, 1, cells, path)] if ranks == 1 else run_ranks(loaded, ranks, cells, path, timeout=100)
        for cell, state in [pair for result in results for pair in result.items()]:
            if len(cell) == 2:
                assert differing(state, expected) == [], cell
            for key, value in expected.items():
                if len(cell) == 3 and value.is_floating_point():
                    assert (state[key] - value).abs().max() < 0.2, (cell, key)


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


def test_an_earlier_save_leaves_nothing(tmp_path):
    engine = make_small()
    (tmp_path / "w-other.safetensors").write_text("of somebody else")
    for size in (2e-6, 3e-6, 1.0, 2e-6):
        engine.save_weights(tmp_path / "w.safetensors", max_file_gb=size)
        names = {path.name for path in tmp_path.iterdir()} - {"w-other.safetensors"}
        if size == 1.0:
            assert names == {"w.safetensors"}
        else:
            index = json.loads((tmp_path / "w.safetensors.index.json").read_text())["weight_map"]
            assert names == {*index.values(), "w.safetensors.index.json"}
            assert index.keys() == Net().state_dict().keys()


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"format='safetensor' is not one of .*; did you mean 'safetensors'"):
        make_small().save_weights(tmp_path / "w", format="safetensor")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", ["", "new/"])
def test_a_folder_is_no_file_to_write(given, tmp_path):
    """Neither one that is there, nor a path that ends as one."""
    with pytest.raises(InputError, match=r"that is a folder, .*; give a path such as '.*model.safetensors'"):
        make_small().save_weights(f"{tmp_path}/{given}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (None, CheckpointError, r"there is no file .*, and no w.pt.index.json; give what save_weights"),
        (nn.Linear(2, 2), CheckpointError, "loading weights from .* failed: UnpicklingError: Weights only load failed"),
        ({**Net().state_dict(), "more": torch.ones(2)}, InputError, r"does not fit .*:\n  - the model has no more"),
    ],
)
def test_files_that_are_refused(content, error, words, tmp_path):
    engine = make_small()
    before = weights(engine)
    if content is not None:
        torch.save(content, tmp_path / "w.pt")
    with pytest.raises(error, match=words):
        engine.load_weights(tmp_path / "w.pt")
    assert differing(weights(engine), before) == []


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_other_precisions_are_cast(name, tmp_path):
    engine, save = make_small(), torch.save if name == "m.pt" else safetensors.save_file
    before = weights(engine)

    def load(key, value):
        save({**before, key: value}, tmp_path / name)
        engine.load_weights(tmp_path / name)

    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn):
        load("head.bias", before["head.bias"].to(dtype))
        assert torch.equal(engine.model.head.bias, before["head.bias"].to(dtype).float())
        make_engine("one", "naive").load_weights(tmp_path / name)
