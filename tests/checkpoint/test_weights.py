"""engine.save_weights: files that plain torch, timm and transformers load; engine.load_weights takes theirs."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.errors import CheckpointError, InputError
from tests.composition.workloads import criterion, find_workload
from tests.support.checkpoint_runs import FP16, LAYOUTS, Net, make_engine, train
from tests.support.models import MLP
from tests.support.ranks import run_ranks

safetensors = pytest.importorskip("safetensors.torch")
BOTH = {"tensor": 2, "pipeline": {"size": 2, "microbatches": 2}}


def whole(engine):
    """All of the model's weights, as close gives them back."""
    engine.close()
    return {name: value.clone() for name, value in engine.model.state_dict().items()}


def trained(rank, world_size, cells, folder):
    """Saves the weights of several layouts and models in both formats. What they are, by cell."""
    found = {}
    for model, mode in cells:
        workload = find_workload(model)
        engine = halfmesh.initialize(
            workload.build(seed=rank),
            lambda params: torch.optim.SGD(params, lr=0.05),
            criterion,
            config={**FP16[mode], "parallel": BOTH},
            device="cpu",
        )
        x, y = (tensor[:8] for tensor in workload.data())
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        for name in ("weights.safetensors", "weights.pt"):
            kind = "torch" if name.endswith("pt") else "safetensors"
            engine.save_weights(f"{folder}/{model}/{name}", format=kind)
        engine.save_weights(f"{folder}/{model}/parts/model.safetensors", max_file_gb=4e-6)
        found[model] = whole(engine)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    cells = [("gpt", "torch"), ("vit", "naive"), ("llama", "naive")]
    return folder, run_ranks(trained, 4, cells, str(folder), timeout=120)[0]


@pytest.mark.distributed
@pytest.mark.parametrize("model", ["gpt", "vit", "llama"])
def test_plain_models_load_what_was_divided(model, saved):
    """By 2 x 2 ranks: fused and tied weights, buffers, masters in full precision."""
    folder, expected = saved
    for state in (
        safetensors.load_file(folder / model / "weights.safetensors"),
        torch.load(folder / model / "weights.pt", weights_only=True),
    ):
        fresh = find_workload(model).build(seed=9)
        fresh.load_state_dict(state)  # strict
        assert state.keys() == expected[model].keys()
        for name, value in fresh.state_dict().items():
            assert torch.equal(value, expected[model][name]), name


@pytest.mark.distributed
def test_transformers_reads_several_files(saved):
    from transformers import LlamaForCausalLM

    folder, expected = saved
    parts = folder / "llama" / "parts"
    find_workload("llama").build().config.save_pretrained(parts)
    model = LlamaForCausalLM.from_pretrained(parts)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected["llama"][name]), name
    index = json.loads((parts / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == len(list(parts.glob("model-*-of-*.safetensors"))) > 3


@pytest.mark.distributed
def test_timm_reads_them(saved):
    from timm.models import load_checkpoint

    folder, expected = saved
    fresh = find_workload("vit").build(seed=9)
    load_checkpoint(fresh, str(folder / "vit" / "weights.safetensors"))
    assert torch.equal(fresh.blocks[1].attn.qkv.weight, expected["vit"]["blocks.1.attn.qkv.weight"])


def loaded(rank, world_size, cells, path):
    """What weights engines have that load them, and whether they step from there."""
    found = {}
    for layout, mode in cells:
        engine = make_engine(layout, mode, seed=7)
        engine.load_weights(path)
        found[layout, mode] = whole(engine)
        engine = make_engine(layout, mode, seed=7, optimizer=lambda params: torch.optim.SGD(params, lr=1e-3))
        train(engine, 1)
        engine.load_weights(path)
        train(engine, 1)
        found[layout, mode, "stepped"] = whole(engine)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt", "model.safetensors"])
def test_weights_of_others_into_every_layout(name, tmp_path):
    """A file of plain torch, and one that is in parts."""
    expected, path = Net(seed=3).state_dict(), tmp_path / name
    if name == "weights.pt":
        torch.save(expected, path)
    elif name == "weights.safetensors":
        safetensors.save_file(expected, path)
    else:
        engine = make_engine("one", "none", seed=3)
        engine.save_weights(path, max_file_gb=2e-6)
        assert not path.exists()
    layouts = ("one", "zero1", "fsdp", "tp2_fsdp2", "pp2_zero1")
    for ranks in (1, 2, 4):
        cells = [(each, mode) for each in layouts for mode in ("none", "naive") if LAYOUTS[each][0] == ranks]
        results = [loaded(0, 1, cells, path)] if ranks == 1 else run_ranks(loaded, ranks, cells, path, timeout=100)
        for result in results:
            for cell, state in result.items():
                for key, value in expected.items():
                    if len(cell) == 2:
                        assert torch.equal(state[key], value), (cell, key)
                    elif value.is_floating_point():
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
    assert torch.equal(other.model.state_dict()["again.weight"], state["again.weight"])


def test_an_earlier_save_leaves_nothing(tmp_path):
    engine = make_engine("one", "none", seed=3)
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


class WithExtra(Net):
    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_refusals(tmp_path, monkeypatch):
    engine = make_engine("one", "none")
    for arguments, words in (
        ({"format": "safetensor"}, r"format='safetensor' is not one of .*; did you mean 'safetensors'"),
        ({"max_file_gb": 0}, "max_file_gb=0 is not a size of files in GiB; give a number above 0"),
    ):
        with pytest.raises(InputError, match=words):
            engine.save_weights(tmp_path / "w", **arguments)
    with pytest.raises(InputError, match=r"is a folder; give the name of a file in it, such as .*model.safetensors"):
        engine.save_weights(tmp_path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"saving weights to .* failed: (FileExists|NotADirectory)Error"):
        engine.save_weights(tmp_path / "file" / "w.pt", format="torch")
    with pytest.raises(CheckpointError, match=r"there is no file .*, and no w.pt.index.json; give what save_weights"):
        engine.load_weights(tmp_path / "w.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"cannot be read as weights, without running code \(Weights only load f"):
        engine.load_weights(tmp_path / "w.pt")
    torch.save([torch.ones(2)], tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="holds a list; give a file of tensors by name"):
        engine.load_weights(tmp_path / "w.pt")
    torch.save({**Net().state_dict(), "more": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(InputError, match=r"does not fit the model of this engine:\n  - the model has no more"):
        engine.load_weights(tmp_path / "w.pt")
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"up.weight": "../w.pt"}}))
    with pytest.raises(CheckpointError, match=r"names '../w.pt', which is not a file of its own folder"):
        engine.load_weights(tmp_path / "x.safetensors")
    index.write_text("[]")
    with pytest.raises(CheckpointError, match=r"is not an index of weights \(TypeError"):
        engine.load_weights(index)
    extra = make_engine("one", "none", model=WithExtra())
    with pytest.raises(InputError, match=r"holds more than tensors \(_extra_state\), which safetensors cannot"):
        extra.save_weights(tmp_path / "e.safetensors")
    extra.save_weights(tmp_path / "e.pt", format="torch")
    assert torch.load(tmp_path / "e.pt", weights_only=True)["_extra_state"] == {"seen": 3}
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(InputError, match="needs the package of that name: pip install safetensors; or use format='tor"):
        engine.save_weights(tmp_path / "w.safetensors")


def small(**options):
    return make_engine("one", "none", samples=16, batch=4, **options)


@pytest.mark.parametrize("size", [float("inf"), float("nan"), 0, -1, "5", None, True, 10**400])
def test_sizes_of_files_that_are_none(size, tmp_path):
    with pytest.raises(InputError, match=r"max_file_gb=.* is not a size of files in GiB; give a number above 0"):
        small().save_weights(tmp_path / "model.safetensors", max_file_gb=size)


@pytest.mark.parametrize(
    ("name", "format", "other"),
    [
        ("m.pt", "safetensors", "torch"),
        ("m.bin", "safetensors", "torch"),
        ("m.safetensors", "torch", "safetensors"),
    ],
)
def test_a_name_that_is_of_another_format(name, format, other, tmp_path):
    with pytest.raises(InputError, match=rf"m\.\w+ ends like a file of the format '{other}'.*; give format='{other}'"):
        small().save_weights(tmp_path / name, format=format)
    small().save_weights(tmp_path / name, format=other)
    small().save_weights(tmp_path / "weights", format=format)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "weights"])


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.int64, "integer"), (torch.bool, "bool"), (torch.complex64, "complex"), (torch.uint8, "integer")],
)
def test_numbers_of_another_kind(name, dtype, kind, tmp_path):
    engine = small()
    before = {key: value.clone() for key, value in engine.model.state_dict().items()}
    changed = {**before, "head.bias": before["head.bias"].to(dtype)}
    save = torch.save if name == "m.pt" else safetensors.save_file
    save(changed, tmp_path / name)
    words = rf"other kinds of numbers: head.bias \({kind} in the file, floating point here\); convert them"
    with pytest.raises(InputError, match=words):
        engine.load_weights(tmp_path / name)
    assert all(torch.equal(value, before[key]) for key, value in engine.model.state_dict().items())
    for fits in (torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        save({**before, "head.bias": before["head.bias"].to(fits)}, tmp_path / name)
        engine.load_weights(tmp_path / name)
        assert torch.equal(engine.model.head.bias, before["head.bias"].to(fits).float())
    save({**before, "norm.num_batches_tracked": torch.tensor(2.5)}, tmp_path / name)
    with pytest.raises(InputError, match=r"num_batches_tracked \(floating point in the file, integer here\)"):
        engine.load_weights(tmp_path / name)
