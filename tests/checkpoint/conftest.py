"""Signals that a run handles are as before when a test ends."""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(autouse=True)
def _signals_are_as_before():
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)
