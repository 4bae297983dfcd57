"""A pytest plugin (`-p tests.support.flaky`): runs each red test once more, alone, after the others.

A test that is red twice stays a failure. One that is red once is printed as FLAKY with its name, and counted as "flaky"
in pytest's last line; it alone does not fail the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator

import pytest

MOST = 10
"""More red tests than this are no accident: none of them is run again."""


# Within the wrapper that prints the summary, and after the one that ends the workers of xdist.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None]:
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or exitstatus != pytest.ExitCode.TESTS_FAILED or hasattr(session.config, "workerinput"):
        return
    red = {report.nodeid: report for kind in ("error", "failed") for report in reporter.stats.get(kind, [])}
    if not 0 < len(red) <= MOST:
        return
    green = {name: report for name, report in red.items() if _passes_alone(name, session.config)}
    for kind in ("error", "failed") if green else ():
        reporter.stats[kind] = [report for report in reporter.stats.get(kind, []) if report.nodeid not in green]
        reporter.stats["flaky"] = list(green.values())
    if len(green) == len(red):
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    flaky = terminalreporter.stats.get("flaky", [])
    for report in flaky:
        terminalreporter.section(report.nodeid)
        terminalreporter.write_line(report.longreprtext)
    for report in flaky:
        terminalreporter.write_line(f"FLAKY {report.nodeid}: red once, green when it ran again, alone")


def _passes_alone(name: str, config: pytest.Config) -> bool:
    """Whether the test `name` passes in a run of its own."""
    options = ["-q", "-p", "no:tests.support.flaky", f"--rootdir={config.rootpath}"]
    environ = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    print(f"\nonce more, alone: {name}", flush=True)
    done = subprocess.run([sys.executable, "-m", "pytest", *options, name], cwd=config.rootpath, env=environ)
    return done.returncode == pytest.ExitCode.OK
