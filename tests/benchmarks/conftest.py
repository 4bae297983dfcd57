"""Benchmarks quieten halfmesh's log for their process; tests share theirs with others."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _keep_the_level_of_the_log() -> Iterator[None]:
    log = logging.getLogger("halfmesh")
    level = log.level
    yield
    log.setLevel(level)
