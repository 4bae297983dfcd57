"""Signals that a run handles are as before when a test ends."""

import signal

import pytest


@pytest.fixture(autouse=True)
def _signals_are_as_before():
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before:
        signal.signal(number, handler)
