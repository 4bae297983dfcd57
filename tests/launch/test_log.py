"""Who speaks, with which prefix, and where the text goes under the usual logging set-ups."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from halfmesh.log import get_logger, rank_and_world_size
from tests.support.ranks import run_ranks


@pytest.fixture
def bare_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """Logging as in a fresh interpreter: a root of its own, without the handlers that pytest adds for each test."""
    own = logging.getLogger("halfmesh")
    monkeypatch.setattr(own, "parent", logging.RootLogger(logging.WARNING))
    monkeypatch.setattr(own, "handlers", [])
    monkeypatch.setattr(own, "level", logging.NOTSET)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    own.manager._clear_cache()  # type: ignore[attr-defined]
    yield own
    own.manager._clear_cache()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _keep_level() -> Iterator[None]:
    own = logging.getLogger("halfmesh")
    before = own.level
    yield
    own.setLevel(before)


def test_a_message_is_visible_without_any_set_up(
    bare_logging: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log = get_logger()
    log.info("the plan: %d stages", 2)
    log.warning("beware")
    log.debug("detail")
    assert capsys.readouterr().err == "the plan: 2 stages\nWARNING: beware\n"
    assert bare_logging.handlers == []
    assert bare_logging.parent is not None
    assert bare_logging.parent.handlers == []


def test_a_logger_asked_for_twice_prints_once(bare_logging: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    get_logger()
    get_logger("halfmesh.engine").info("once")
    assert capsys.readouterr().err == "once\n"


def test_the_users_handler_takes_over(bare_logging: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    assert bare_logging.parent is not None
    bare_logging.parent.addHandler(handler)  # the root has level WARNING: the plan is seen all the same
    get_logger().info("plan of %s", "x")
    assert [record.getMessage() for record in records] == ["plan of x"]
    assert records[0].filename == "test_log.py"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("way", ["level", "null handler", "disabled", "filter"])
def test_the_user_can_silence_it(
    bare_logging: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "level":
        bare_logging.setLevel(logging.WARNING)
    elif way == "null handler":
        bare_logging.addHandler(logging.NullHandler())
    elif way == "disabled":
        monkeypatch.setattr(bare_logging, "disabled", True)
    else:
        monkeypatch.setattr(bare_logging, "filters", [lambda record: False])
    get_logger().info("plan")
    assert capsys.readouterr().err == ""


def test_only_the_named_ranks_speak_and_say_who_they_are(
    bare_logging: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    log = get_logger()
    log.info("for rank 0")
    log.error("for rank 1", ranks=(1, 2))
    log.info("for all", ranks=None)
    assert capsys.readouterr().err == "ERROR: [rank 1] for rank 1\n[rank 1] for all\n"


def test_a_malformed_rank_does_not_stop_a_message(
    bare_logging: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "first")
    get_logger().info("still here")
    assert capsys.readouterr().err == "still here\n"


def whoami(rank: int, world_size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    inside = rank_and_world_size()
    dist.destroy_process_group()
    return inside, rank_and_world_size()


@pytest.mark.distributed
def test_the_process_group_tells_the_rank() -> None:
    assert run_ranks(whoami, 2) == [((0, 2), (0, 1)), ((1, 2), (0, 1))]
