"""docs/migration/: our side runs, theirs where it is installed, and then the weights are the same."""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import halfmesh
from halfmesh import compat
from halfmesh.cli.convert_config import flatten
from halfmesh.config.load import load_config
from halfmesh.migration.table import convert
from halfmesh.migration.tables import ORIGINS
from tests.support.pages import find_blocks, find_rows, read_page, snippet, stand_ins
from tests.support.ranks import rank_device, run_ranks

pytestmark = pytest.mark.slow

CONFIGS = {  # by page
    "accelerate": snippet("migration/accelerate.md", "accelerate_config.py"),
    "fabric": snippet("migration/fabric.md", "fabric_config.py"),
    "transformers": snippet("migration/transformers.md", "transformers_config.py"),
    "deepspeed": snippet("migration/deepspeed.md", "deepspeed_config.py"),
    "fsdp": snippet("migration/fsdp.md", "fsdp_config.py"),
    "torchtitan": snippet("migration/torchtitan.md", "torchtitan_config.py"),
    "megatron": snippet("migration/megatron.md", "megatron_config.py"),
    "colossalai": snippet("migration/colossalai.md", "colossal_config.py"),
    "sagemaker": snippet("migration/sagemaker.md", "sagemaker_config.py"),
}


@pytest.fixture(autouse=True)
def accelerate_forgets():
    """Its settings belong to the process, and reject others in the tests that follow."""
    yield
    if "accelerate" in sys.modules:
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


def side(page, sign):
    """One side of the difference that a page shows; with " " the lines of both."""
    (block,) = find_blocks(read_page(page), "diff")
    return "\n".join(line[1:] for line in block.splitlines() if line[0] in (" ", sign))


def weights_after(code, names):
    exec(code, names)
    weights = (names["engine"].model if "engine" in names else names["model"]).state_dict()
    return {name.removeprefix("module."): value.float() for name, value in weights.items()}


def difference(one, other):
    """The largest, relative to the largest weight."""
    assert one.keys() == other.keys()
    return max(((one[name] - other[name]).abs().max() / other[name].abs().max()).item() for name in one)


def test_configs_can_run(tmp_path):
    for page, text in CONFIGS.items():
        (tmp_path / "config.py").write_text(text)
        assert compat.check(load_config(tmp_path / "config.py"), 8, "cuda") == [], page


@pytest.mark.parametrize(("page", "package"), [("accelerate", "accelerate"), ("fabric", "lightning_fabric")])
def test_our_side_trains_to_the_weights_of_theirs(page, package, tmp_path, monkeypatch):
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    Path("config.py").write_text(CONFIGS[page])
    exec(
        "from accelerate import Accelerator" if page == "accelerate" else "from lightning_fabric import Fabric",
        names := {},
    )
    theirs, ours = (
        weights_after(side(f"migration/{page}.md", sign), stand_ins() | names | {"halfmesh": halfmesh}) for sign in "-+"
    )
    assert difference(ours, stand_ins()["model"].state_dict()) > 1e-2
    assert difference(ours, theirs) < 1e-6


def calls_for_accelerates(rank, world_size, folder):
    names, seen = stand_ins(), {"batches": 3}
    given = [names[name] for name in ("model", "optimizer", "criterion")]
    engine = halfmesh.initialize(*given, device=rank_device())
    engine.attach("name", seen)
    engine.save(folder)
    seen["batches"] = 9
    engine.load(folder)
    dist.barrier()
    found = engine.context.rank == 0, engine.model is names["model"], seen["batches"]
    engine.close()
    return found


@pytest.mark.distributed
def test_calls_of_accelerate_have_an_equivalent(tmp_path):
    rows = dict(find_rows(read_page("migration/accelerate.md"), "accelerate | halfmesh"))
    assert rows["`accelerator.is_main_process`"] == "`engine.context.rank == 0`"
    assert rows["`accelerator.register_for_checkpointing(obj)`"] == '`engine.attach("name", obj)`'
    assert rows["`accelerator.unwrap_model(model)`"].startswith("`engine.model`")
    found = run_ranks(calls_for_accelerates, 2, str(tmp_path / "saved"))
    assert found == [(True, True, 3), (False, True, 3)]


def test_transformers_trainer(tmp_path, monkeypatch):
    """With texts that have different numbers of labels, and an epoch whose last cycle is shorter."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    Path("config.py").write_text(CONFIGS["transformers"])
    words = "TrainingArguments Trainer default_data_collator get_linear_schedule_with_warmup"
    try:
        names = {name: getattr(transformers, name) for name in words.split()}
    except ImportError as error:
        pytest.skip(f"of transformers, whose Trainer needs more: {error}")
    names |= {"halfmesh": halfmesh, "torch": torch}
    exec(snippet("models.md", "weighted.py"), names)

    def weights(sign):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
        words = torch.randint(1, 64, (36, 8))
        dataset = [{"input_ids": row, "labels": row.masked_fill(row < n, -100)} for n, row in enumerate(words)]
        given = {"model": model, "dataset": dataset, "DataLoader": DataLoader}
        here = '"out", use_cpu=True, report_to="none", save_strategy="no",'
        code = side("migration/transformers.md", sign).replace('"out",', here)
        return weights_after(code, names | given)

    theirs, ours, start = map(weights, "-+ ")
    for name, value in theirs.items():
        assert (ours[name] - value).abs().mean() < 0.01 * (start[name] - value).abs().mean(), name


def fully_sharded_by_hand(rank, world_size, by_hand):
    names = stand_ins()
    model, x, y = names["model"], *names["dataloader"].dataset[:]
    if by_hand:
        exec(snippet("migration/fsdp.md", "by_hand.py"), names)
    else:
        exec(CONFIGS["fsdp"], config := {})
        config = {name: config[name] for name in ("bf16", "parallel", "clip_grad_norm")}
        engine = halfmesh.initialize(model, names["optimizer"], names["criterion"], config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)  # by hand it is made after sharding
    for batch in torch.arange(60).view(-1, 2, 6)[:, rank]:
        if by_hand:
            names["criterion"](model(x[batch]).float(), y[batch]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(engine.criterion(engine(x[batch]), y[batch]))
            engine.step()
            engine.zero_grad()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.distributed
def test_fully_shard_by_hand():
    theirs, ours = (run_ranks(fully_sharded_by_hand, 2, by_hand, timeout=120)[0] for by_hand in (True, False))
    assert difference(ours, stand_ins()["model"].state_dict()) > 1e-2
    assert difference(ours, theirs) < 1e-6


# --- plain PyTorch ----------------------------------------------------------------------------------------------------


def with_a_scheduler():
    names = stand_ins()
    scheduler = torch.optim.lr_scheduler.StepLR(names["optimizer"], 1, gamma=0.5)
    return names | {"dataset": names["dataloader"].dataset, "device": rank_device(), "scheduler": scheduler}


def trained_by_both_loops(rank, world_size):
    sides = snippet("migration/pytorch.md", "before.py"), snippet("migration/pytorch.md", "after.py")
    weights = []
    for code in sides:
        exec(code, names := with_a_scheduler())
        weights.append(names["model"].state_dict())
    return weights


@pytest.mark.distributed
def test_the_loop_before_and_after_on_two_processes():
    for before, after in run_ranks(trained_by_both_loops, 2, timeout=120):
        assert difference(before, stand_ins()["model"].state_dict()) > 1e-2, "it trained"
        assert difference(after, before) < 2e-4


def clip(engine, x, y):
    engine.backward(engine.criterion(engine(x), y))
    torch.nn.utils.clip_grad_norm_(engine.model.parameters(), 1e-3)
    engine.step(last=True)


def again(make):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = make(torch.nn.Linear(2, 2))
    finally:
        dist.destroy_process_group()
    halfmesh.initialize(model, torch.optim.SGD(model.parameters(), 0.1), config={}, device="cpu")


LEFT_IN = {
    "`DistributedDataParallel(model)`": lambda engine, x, y: again(DistributedDataParallel),
    "`model.half()`": lambda engine, x, y: again(torch.nn.Module.half),
    "`clip_grad_norm_(model.parameters(), 1.0)`": clip,
}


def test_the_table_of_what_is_left_in(caplog):
    rows = dict(find_rows(read_page("migration/pytorch.md"), "left in"))
    assert rows.keys() == LEFT_IN.keys()
    for what, row in rows.items():
        names = stand_ins()
        given = [names[name] for name in ("model", "optimizer", "criterion", "dataloader")]
        config = {"fp16": {"mode": "torch", "init_scale": 8.0}, "gradient_accumulation": 2}
        engine = halfmesh.initialize(*given, config)
        told, is_warning, _ = row.partition(" (a warning")
        told = re.escape(told).replace(r"\.\.\.", ".*")
        with nullcontext() if is_warning else pytest.raises(halfmesh.HalfmeshError, match=told):
            LEFT_IN[what](engine, *next(iter(engine.dataloader)))
        assert not is_warning or re.search(told, caplog.text)


# --- apex -----------------------------------------------------------------------------------------------------------


def test_apex_with_an_engine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.py").write_text(snippet("migration/apex.md", "config.py"))
    exec(side("migration/apex.md", "+"), names := stand_ins() | {"halfmesh": halfmesh})
    assert names["engine"].config.fp16.options.opt_level == "O2"
    assert {value.dtype for value in names["engine"].state_dict()["model"].values()} == {torch.float32}
    assert names["engine"].global_step == 15
    assert names["loss"] < 0.7


def test_apex_in_a_loop_of_ones_own(run):
    given = stand_ins() | {"halfmesh": halfmesh}
    model = given["model"]
    names = run("migration/apex.md", "convert.py", given=given)
    assert names["model"].module is model
    assert set(names["model"].state_dict()) == set(model.state_dict())
    assert names["loss"] < 0.7


# --- configs of others ----------------------------------------------------------------------------------------------


def test_the_configs_of_others_become_the_configs_of_the_page(tmp_path):
    (block,) = find_blocks(read_page("migration/deepspeed.md"), "json")
    (tmp_path / "config.py").write_text(CONFIGS["deepspeed"])
    _, config = convert(ORIGINS["deepspeed"], dict(flatten(json.loads(block))))
    assert load_config(config) == load_config(tmp_path / "config.py").replace(clip_grad_norm=1.0)

    given = {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 1000}}
    (tmp_path / "config.py").write_text(CONFIGS["sagemaker"])
    _, config = convert(ORIGINS["sagemaker"], dict(flatten(given)))
    assert load_config(config) == load_config(tmp_path / "config.py").replace(clip_grad_norm=0.0)
