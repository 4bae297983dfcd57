"""Who speaks, with which prefix, and where the text goes under the usual logging set-ups."""

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
    own.manager._clear_cache()  # type: ignore[attr-defined]
    yield own
    own.manager._clear_cache()  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", ["nothing", "listener", "handler", "level"])
def test_a_message_is_visible_once_and_the_user_can_take_over_or_silence_it(own, capsys, way):
    records = []
    handler = Listener(logging.WARNING) if way == "listener" else logging.Handler()
    handler.emit = records.append
    if way == "level":
        own.setLevel(logging.ERROR)
    elif way == "handler":  # the root has level WARNING: the plan is seen all the same
        own.parent.addHandler(handler)
    elif way == "listener":
        own.addHandler(handler)
    get_logger("halfmesh.engine.engine").info("the plan: %d stages", 2)
    get_logger().warning("beware")
    get_logger().debug("detail")
    shown = "the plan: 2 stages\nWARNING: beware\n"
    assert capsys.readouterr().err == (shown if way in ("nothing", "listener") else "")
    heard = [record.getMessage() for record in records]
    assert heard == {"listener": ["beware"], "handler": ["the plan: 2 stages", "beware"]}.get(way, [])


def test_only_the_named_ranks_speak_and_say_who_they_are(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    log = get_logger()
    log.info("for rank 0")
    log.error("for rank 1", ranks=(1, 2))
    log.info("for all", ranks=None)
    assert capsys.readouterr().err == "ERROR: [rank 1] for rank 1\n[rank 1] for all\n"
