"""One thread per process, whoever starts the tests: several ranks share the cores, and sums depend on the threads."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell ignores it for what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from halfmesh.utils.log import get_logger
from tests.support.ranks import PLACES, end_teams, find_obstacle, ranks_on

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    places = "; ".join(f"{name}: {words}" for name, words in PLACES.items())
    parser.addoption("--ranks-on", choices=list(PLACES), help=f"where the ranks of distributed tests run. {places}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--ranks-on"):
        os.environ["RANKS_ON"] = config.getoption("--ranks-on")  # the ranks read it, too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "SIMULATED_GPU" in os.environ and (lacks := item.get_closest_marker("not_simulated")):
            item.add_marker(pytest.mark.skip(reason=f"the simulated GPUs have no {lacks.args[0]}"))
    if ranks_on() == "gloo-cpu":
        return
    for item in items:
        if on_cpu := item.get_closest_marker("on_cpu"):
            item.add_marker(pytest.mark.skip(reason=f"{ranks_on()}: {on_cpu.args[0]}"))
        if item.get_closest_marker("sends") and (obstacle := find_obstacle(1, sends=True)):
            item.add_marker(pytest.mark.skip(reason=obstacle))


def pytest_collection_finish() -> None:
    """What was imported and collected is not searched for garbage again, which tests and engines ask for often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _keep_the_level_of_the_log() -> Iterator[None]:
    """Benchmarks quieten halfmesh's log for their process; tests share theirs with others."""
    log = get_logger().logger
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture(scope="module", autouse=True)
def _end_teams() -> Iterator[None]:
    """Processes are used by one test file only."""
    yield
    end_teams()
