"""Who speaks, with which prefix, and where the text goes under the usual logging set-ups."""

from __future__ import annotations

import logging

import pytest

from halfmesh.utils.log import Listener, get_logger


@pytest.fixture(autouse=True)
def own(monkeypatch):
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


def test_a_message_is_visible_once_without_any_set_up(own, capsys):
    log = get_logger()
    get_logger("halfmesh.engine.engine").info("the plan: %d stages", 2)
    log.warning("beware")
    log.debug("detail")
    assert capsys.readouterr().err == "the plan: 2 stages\nWARNING: beware\n"
    assert own.handlers == own.parent.handlers == []


def test_the_users_handler_takes_over(own, capsys):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    own.parent.addHandler(handler)  # the root has level WARNING: the plan is seen all the same
    get_logger().info("plan of %s", "x")
    assert [record.getMessage() for record in records] == ["plan of x"]
    assert capsys.readouterr().err == ""


def test_who_only_listens_shows_nothing(own, capsys):
    heard = []
    listener = Listener(logging.WARNING)
    listener.emit = heard.append
    own.addHandler(listener)
    get_logger("halfmesh.engine.engine").info("plan")
    get_logger("halfmesh.engine.engine").warning("beware")
    assert [record.getMessage() for record in heard] == ["beware"]
    assert capsys.readouterr().err == "plan\nWARNING: beware\n"


@pytest.mark.parametrize("way", ["level", "null handler"])
def test_the_user_can_silence_it(own, capsys, way):
    own.setLevel(logging.WARNING) if way == "level" else own.addHandler(logging.NullHandler())
    get_logger().info("plan")
    assert capsys.readouterr().err == ""


def test_only_the_named_ranks_speak_and_say_who_they_are(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    log = get_logger()
    log.info("for rank 0")
    log.error("for rank 1", ranks=(1, 2))
    log.info("for all", ranks=None)
    assert capsys.readouterr().err == "ERROR: [rank 1] for rank 1\n[rank 1] for all\n"
