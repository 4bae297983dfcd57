"""docs/loop.md: its loops run, and what it says of mistakes is what one is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import halfmesh
from tests.docs.test_readme import find_python, find_rows, find_text, stand_ins

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "loop.md").read_text()


@pytest.fixture
def names():
    return stand_ins() | {"halfmesh": halfmesh, "config": {}}


def test_the_loop(names):
    exec(find_python(PAGE, "train.py"), names)
    assert names["engine"].global_step == 45
    assert names["loss"] < 0.5


def test_accumulation(names, capsys):
    exec(find_python(PAGE, "accumulation.py"), names)
    assert capsys.readouterr().out == find_text(PAGE)[0]


def test_a_loader_of_ones_own(names):
    names["my_batches"] = list(names["dataloader"])
    names["engine"] = halfmesh.initialize(
        names["model"], names["optimizer"], names["criterion"], None, {"gradient_accumulation": 4}
    )
    exec(find_python(PAGE, "own_loader.py"), names)
    assert names["engine"].global_step == 4


def test_evaluation(names):
    exec(find_python(PAGE, "train.py").replace("engine.close()", ""), names)
    exec(find_python(PAGE, "evaluation.py"), names)
    assert names["counts"][1] == 60
    assert 0.5 < names["accuracy"] <= 1


def test_what_a_step_returns():
    rows = find_rows(PAGE, "attribute")
    public = {name for name in vars(halfmesh.StepResult) if not name.startswith("_")}
    assert {row[0].strip("`") for row in rows} == public


def test_calls_exist(names):
    for call in re.findall(r"`engine\.(\w+)", PAGE):
        assert hasattr(halfmesh.Engine, call) or call in ("context", "model", "global_step", "config"), call


def mistakes():
    """What stands in the table, as a function that makes the mistake."""

    def scheduler_too(engine, x, y):
        for _ in range(2):
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
            engine.lr_scheduler.step()

    return {
        "`loss.backward(); engine.step()`": lambda engine, x, y: (
            engine.criterion(engine(x), y).backward(),
            engine.step(),
        ),
        "`optimizer.step()`": lambda engine, x, y: engine.optimizer.step(),
        "`a, b, c, d = engine`": lambda engine, x, y: [*engine],
        "`engine.clip_grad_norm_(1.0)` before backward": lambda engine, x, y: engine.clip_grad_norm_(1.0),
        "`engine.backward(loss.detach())`": lambda engine, x, y: engine.backward(
            engine.criterion(engine(x), y).detach()
        ),
        "`engine.backward(losses)` of a vector": lambda engine, x, y: engine.backward(engine(x).sum(1)),
        "`scheduler.step()`": scheduler_too,
    }


def test_the_table_of_mistakes_is_complete():
    assert [row[0] for row in find_rows(PAGE, "instead of")] == list(mistakes())


@pytest.mark.parametrize("number", range(len(mistakes())))
def test_the_mistakes(number, names):
    what, _, told = find_rows(PAGE, "instead of")[number]
    scheduler = torch.optim.lr_scheduler.StepLR(names["optimizer"], 10)
    given = [names[name] for name in ("model", "optimizer", "criterion", "dataloader")]
    engine = halfmesh.initialize(*given, {}, lr_scheduler=scheduler)
    x, y = next(iter(engine.dataloader))
    with pytest.raises((halfmesh.HalfmeshError, TypeError), match=re.escape(told)):
        mistakes()[what](engine, x, y)
