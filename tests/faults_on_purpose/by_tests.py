"""Runs tests in processes that have a fault: each is forked from one that has imported all, and so takes a second."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from typing import Any

import pytest

from halfmesh.distributed.local_ranks import LocalRanks, start_server
from tests.support.ranks import PRELOAD

from .fault import NOT_THERE, ROOT, Text, put

MOST_S = 250.0
"""So long a run may take."""
HANGS_S = 10.0
"""Ranks that take longer hang."""


@dataclass(frozen=True)
class Result:
    """How tests ended.

    Attributes:
        red, green: the tests that failed, and that passed.
        output: what pytest wrote.
    """

    red: tuple[str, ...]
    green: tuple[str, ...]
    output: str


Run = Callable[[Sequence[Text], Sequence[str]], Result]
"""Runs tests with a fault."""


@contextmanager
def running_tests(files: Iterable[str]) -> Iterator[Run]:
    """A scope in which tests of `files` are run, in forks of a process that has collected these."""
    command = [sys.executable, "-m", __name__, *dict.fromkeys(files)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=-1, stdout=-1, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def run(texts: Sequence[Text], tests: Sequence[str]) -> Result:
            server.stdin.write(json.dumps([[asdict(text) for text in texts], list(tests)]) + "\n")
            server.stdin.flush()
            line = server.stdout.readline()
            assert line, "the process that runs tests has ended"
            result = Result(*json.loads(line))
            assert NOT_THERE not in result.output, result.output
            return result

        yield run
        server.stdin.close()  # it ends


class Outcomes:
    """A plugin of pytest that notes how tests ended."""

    def __init__(self) -> None:
        self.red: list[str] = []
        self.green: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.red.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.green.append(report.nodeid)


def run_pytest(*args: str) -> tuple[list[str], list[str], str]:
    """The tests that failed and that passed, and the output."""
    found, output = Outcomes(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        pytest.main(["-q", "-p", "no:cacheprovider", "--capture=sys", *args], [found])
    return found.red, found.green, output.getvalue()


def begin_faulty(self: LocalRanks, function: Any, args: Sequence[Any] = (), **options: Any) -> None:
    """`LocalRanks.begin` of ranks that have the fault of this process."""
    if _texts:
        options["timeout"] = HANGS_S
    _begin(self, call_faulty, (_texts, function, tuple(args)), **options)


def call_faulty(texts: Sequence[Text], function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What `function` returns in a process with a fault."""
    with put(texts):
        return function(*args)


_begin = LocalRanks.begin
_texts: Sequence[Text] = ()


def be_faulty(texts: Sequence[Text], tests: Sequence[str], pipe: int) -> None:
    """In a fork: run tests, and send how they ended."""
    global _texts
    _texts = texts
    os.setsid()
    # The server of ranks is the parent's child, and runs.
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    LocalRanks.begin = begin_faulty  # type: ignore[method-assign]
    with put(texts), open(pipe, "w") as answer:
        json.dump(run_pytest("--maxfail=1", *tests), answer)


def serve(files: Sequence[str]) -> None:
    """Answer each line of the standard input by one."""
    answers, sys.stdout = sys.stdout, sys.stderr
    start_server(PRELOAD)
    red, _, output = run_pytest("--collect-only", *files)
    assert not red, output
    for line in sys.stdin:
        changes, tests = json.loads(line)
        receiver, sender = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                be_faulty([Text(**change) for change in changes], tests, sender)
                status = 0
            finally:
                os._exit(status)
        os.close(sender)
        signal.signal(signal.SIGALRM, lambda *_, pid=pid: os.killpg(pid, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, MOST_S)
        with open(receiver) as answer:
            text = answer.read()
        os.waitpid(pid, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(text or json.dumps([[], [], "it ended without an answer"]), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
