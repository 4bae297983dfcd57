"""docs/amp-plugin.md, tensor-plan.md and hooks.md: what they show works when it is copied."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import halfmesh
from tests.docs.test_readme import check, find_blocks, find_python, find_rows, find_text, stand_ins
from tests.support.ranks import run_ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"
PLUGIN, PLAN, HOOKS = ((DOCS / name).read_text() for name in ("amp-plugin.md", "tensor-plan.md", "hooks.md"))


@contextlib.contextmanager
def modules_of(page, folder, *names):
    """Blocks of a page as modules that can be imported, in `folder`."""
    for name in names:
        (Path(folder) / name).write_text(find_python(page, name))
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name.removesuffix(".py"), None)


# --- an AMP plugin --------------------------------------------------------------------------------------------------


@pytest.fixture
def careful(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with modules_of(PLUGIN, tmp_path, "careful_amp.py", "config.py"):
        import careful_amp  # type: ignore[import-not-found]

        yield careful_amp.CarefulAMP
        halfmesh.AMP_PLUGINS.unregister("careful")


def test_the_plugin_trains_as_its_test_says(careful):
    names = {}
    exec(find_python(PLUGIN, "test_careful.py"), names)
    names["test_it_trains_like_fp32"]()


def test_the_plugin_is_configured_and_checked(careful, tmp_path):
    config = halfmesh.load_config("config.py")
    assert careful.recipe(config.fp16.options, torch.float16).loss_scale.min_scale == 256.0
    with pytest.raises(halfmesh.ConfigError, match=r"bf16\.floor: bf16 has the range of fp32"):
        halfmesh.load_config({"bf16": {"mode": "careful", "floor": 1.0}})
    (tmp_path / "wrong.py").write_text(
        "fp16 = dict(mode='careful')\nparallel = dict(pipeline=dict(size=2, microbatches=2))\n"
    )
    command, expected = find_blocks(PLUGIN, "console")[0].split("\n", 1)
    assert check(command) == expected
    assert "| careful bf16 | yes |" in halfmesh.compat.render_table()


@pytest.mark.parametrize(
    "kind", [halfmesh.Recipe, halfmesh.LossScale, halfmesh.Composes], ids=lambda kind: kind.__name__
)
def test_the_tables_of_fields(kind):
    rows = {row[0].strip("`"): row[1].strip("`") for row in find_rows(PLUGIN, f"field of {kind.__name__}")}
    default = kind()
    assert {name: eval(value) for name, value in rows.items()} == {
        field.name: getattr(default, field.name) for field in dataclasses.fields(kind)
    }


# --- a tensor plan --------------------------------------------------------------------------------------------------


def parity(rank, world_size, folder):
    with modules_of(PLAN, folder, "my_block.py") if rank == 0 else contextlib.nullcontext():
        torch.distributed.barrier()
        sys.path.insert(0, str(folder))
        exec(find_python(PLAN, "parity.py, started with: torchrun --standalone --nproc-per-node 2 parity.py"), {})


def by_patterns(rank, world_size):
    names, config = {}, {}
    exec(find_python(PLAN, "my_block.py"), names)
    exec(find_python(PLAN, "patterns.py"), config)
    model = torch.nn.Sequential(names["Block"](16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfmesh.initialize(model, optimizer, None, None, {"parallel": config["parallel"]}, device="cpu")
    found = {name: tuple(param.shape) for name, param in model.named_parameters()}, model[0].attention.num_heads
    engine.close()
    return found


@pytest.mark.distributed
def test_the_plan_is_right(tmp_path):
    run_ranks(parity, 2, tmp_path)
    for shapes, heads in run_ranks(by_patterns, 2):
        assert heads == 2
        assert shapes["0.attention.qkv.weight"] == (24, 16)
        assert shapes["0.down.weight"] == (16, 32)
        assert shapes["0.norm.weight"] == (16,)


# --- a hook ---------------------------------------------------------------------------------------------------------


def test_a_hook_that_measures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = stand_ins()
    try:
        with modules_of(HOOKS, tmp_path, "weight_hook.py"):
            exec(find_python(HOOKS, "use.py"), names)
    finally:
        halfmesh.HOOKS.unregister("largest_weight")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    largest = max(param.abs().max().item() for param in names["model"].parameters())
    assert lines[-1]["largest_weight"] == pytest.approx(largest)
    assert len(lines) == 3


def test_a_hook_that_decides(tmp_path):
    names = stand_ins() | {"halfmesh": halfmesh}
    exec(find_python(HOOKS, "budget_hook.py"), names)
    engine = halfmesh.initialize(*[names[name] for name in ("model", "optimizer", "criterion", "dataloader")], {})
    halfmesh.Trainer(engine).fit(epochs=3, hooks=[names["BudgetHook"](0.0, tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


class Logs(halfmesh.Hook):
    """Writes down what it is called for."""

    def __init__(self):
        self.events = []


def _note(name):
    def method(self, *args):
        if not self.events or self.events[-1] != name:
            self.events.append(name)
        return {}

    return method


for _name in [name for name in vars(halfmesh.Hook) if not name.startswith("_")]:
    setattr(Logs, _name, _note(_name))


def test_the_order_of_events(tmp_path):
    names, log = stand_ins(), Logs()
    given = [names[name] for name in ("model", "optimizer", "criterion", "dataloader")]
    engine = halfmesh.initialize(*given, {}, eval_dataloader=names["eval_dataloader"])
    trainer = halfmesh.Trainer(engine, log_every=15)
    trainer.fit(epochs=1, hooks=[log])
    assert log.events[:5] == ["before_fit", "before_epoch", "before_batch", "after_batch", "after_step"]
    last = log.events[log.events.index("measure") - 1 :]
    expected = ["after_step", "measure", "write", "after_epoch", "before_eval", "after_eval_batch"]
    assert last == [*expected, "eval_results", "after_eval", "write", "after_fit", "state_dict", "close"]
    picture = re.findall(r"[a-z]+_[a-z_]+|measure|write|close", find_text(HOOKS)[0])
    assert set(log.events) <= set(picture)
    assert {name for name in vars(halfmesh.Hook) if not name.startswith("_")} <= set(picture)
