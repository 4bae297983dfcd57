"""Where a rank is, from its frames; and what is said of several."""

from __future__ import annotations

import threading

import pytest
import torch

from halfmesh import positions
from halfmesh.end_log import End
from halfmesh.layout import Layout
from halfmesh.position_report import report, waiting
from halfmesh.positions import ENDED, IN_BACKWARD, RUNS, SAVE_THREAD, WAITS, Position, Whereabouts
from tests.support.models import MLP, make_data, make_engine


class Asked:
    """Positions found from a thread, while the main one is at a certain place."""

    def __init__(self) -> None:
        self.where = Whereabouts()
        self.found: list[Position] = []

    def ask(self, *_):
        """What the main thread calls."""
        thread = threading.Thread(target=lambda: self.found.append(self.where.here()))
        thread.start()
        thread.join()


@pytest.fixture
def asked():
    return Asked()


def test_in_code_of_the_users(asked):
    engine = make_engine({})
    engine.global_step = 7
    asked.where.watch(engine)
    asked.ask()
    (found,) = asked.found
    assert (found.state, found.call, found.updates) == (RUNS, "", (7,))
    assert " in ask: thread." in found.line  # it starts it, or waits for it
    assert "test_positions.py:" in found.line


def test_within_calls_of_the_engine(asked):
    """Its model, criterion and optimizer are the user's."""

    class Model(MLP):
        def forward(self, x):
            asked.ask()
            return super().forward(x)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = make_engine({}, model=model, optimizer=optimizer)
    optimizer.register_step_pre_hook(asked.ask)
    engine._criterion = lambda output, y: (asked.ask(), torch.nn.functional.cross_entropy(output, y))[1]
    x, y = make_data(8)
    for _ in range(2):
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    calls = ["engine(...)", "engine.criterion()", "engine.step()"]
    assert [found.call for found in asked.found] == calls * 2
    assert [found.updates for found in asked.found] == [(0,)] * 3 + [(1,)] * 3  # without `watch`, too


def test_in_the_loader(asked):
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            asked.ask()
            return torch.ones(8), 0

    engine = make_engine({}, loader=torch.utils.data.DataLoader(Data(), 4))
    next(iter(engine.dataloader))
    assert {found.call for found in asked.found} == {"engine.dataloader"}


def test_an_error_is_where_it_was_raised(asked):
    def waits():
        raise RuntimeError("Timed out")

    try:
        waits()
    except RuntimeError as error:
        asked.where.stop_at(error)
    asked.ask()
    (found,) = asked.found
    assert found.state == WAITS
    assert found.line.endswith('in waits: raise RuntimeError("Timed out")')


@pytest.mark.parametrize(
    ("file", "line", "state"),
    [
        (positions._TORCH + "distributed/distributed_c10d.py", "work.wait()", WAITS),
        (positions._TORCH + "autograd/graph.py", "return x", IN_BACKWARD),
        (positions._TORCH + "nn/modules/linear.py", "return F.linear(input)", RUNS),
        (positions._OURS + "parallel/reducer.py", "self._inflight.popleft().wait()", WAITS),
        (positions._OURS + "parallel/context.py", "dist.all_reduce(tensor)", WAITS),
        (positions._OURS + "amp/optimizer.py", "self.optimizer.step()", RUNS),
        ("/home/me/train.py", "work.wait()", WAITS),
        ("/home/me/train.py", "dist = 3", RUNS),
    ],
)
def test_whether_it_waits(file, line, state, monkeypatch):
    monkeypatch.setattr(positions.linecache, "getline", lambda *_: line)
    code = compile("import sys\nframe = sys._getframe()", file, "exec")
    names: dict = {}
    exec(code, names)
    assert positions._state(names["frame"], 1) == state


def test_a_save_beside_training(asked):
    going = threading.Event()
    thread = threading.Thread(target=going.wait, name=SAVE_THREAD, daemon=True)
    thread.start()
    asked.ask()
    going.set()
    thread.join()
    asked.ask()
    assert "in wait:" in asked.found[0].beside
    assert asked.found[1].beside == ""


def test_as_text():
    position = Position(WAITS, "engine.step()", (3, 1), "train.py:4 in main: engine.step()")
    assert Position.load(position.dump()) == position
    assert str(position) == "waiting, in engine.step(), after updates 3, 1 - train.py:4 in main: engine.step()"
    assert str(Position(ENDED, updates=(5,))) == "ended, after update 5"
    assert str(Position(RUNS, line="a.py:1 in f: x")) == "a.py:1 in f: x"


def test_engines_are_not_kept_alive():
    where = Whereabouts()
    engine = make_engine({})
    where.watch(engine)
    assert where.ended().updates == (0,)
    engine.close()
    del engine
    import gc

    gc.collect()
    assert where.ended().updates == ()


STEP = Position(WAITS, "engine.step()", (118,), "train.py:41 in main: engine.step()")
LOAD = Position(RUNS, "", (117,), "train.py:38 in load: time.sleep(1000)")


def said(found, ends=None, layout=None):
    layout = layout or Layout(5)
    return report(found, ends or dict.fromkeys(range(layout.world_size), End.RUNNING), layout).splitlines()


def test_the_report():
    assert said({0: STEP, 1: LOAD, 2: STEP, 3: STEP}) == [
        "Where the ranks are:",
        "  ranks 0, 2-3: waiting, in engine.step(), after update 118 - train.py:41 in main: engine.step()",
        "  rank 1: after update 117 - train.py:38 in load: time.sleep(1000)   <- not waiting",
        "  rank 4: no answer (stopped, or its machine is lost)",
        "They are not at the same update.",
    ]


def test_places_and_ends():
    ends = {0: End.KILLED, 1: End.FINISHED, 2: End.RUNNING, 3: End.RUNNING}
    assert said({2: STEP, 3: STEP}, ends, Layout(4, tensor=2)) == [
        "Where the ranks are:",
        "  rank 0 (dp 0, tp 0): its process is gone",
        "  rank 1 (dp 0, tp 1): ended",
        "  rank 2 (dp 1, tp 0), rank 3 (dp 1, tp 1): waiting, in engine.step(), after update 118 - "
        "train.py:41 in main: engine.step()",
    ]


def test_different_collectives():
    other = Position(WAITS, "engine.backward()", (118,), "train.py:40 in main: engine.backward(loss)")
    differs = "They wait in different places: each rank has to run the same collectives, in the same order."
    assert said({0: STEP, 1: other}, layout=Layout(2))[-1] == differs
    assert differs not in said({0: STEP, 1: STEP}, layout=Layout(2))
    assert differs not in said({0: STEP, 1: LOAD, 2: other}, layout=Layout(3))
    saves = Position(WAITS, "engine.backward()", (118,), beside="train.py:2 in write: x")
    assert differs not in said({0: STEP, 1: saves}, layout=Layout(2))
    assert waiting({0: STEP, 1: saves, 2: LOAD, 3: other}) == {0, 3}
