"""What holds for every test: what was left out is said at the end, and fails the run where nothing may be."""

import os
import signal
from collections import defaultdict

import pytest
from hypothesis import settings

from tests.needs import LEFT_OUT

settings.register_profile("no clock", deadline=None)  # a busy machine is no failure
settings.load_profile("no clock")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as by a shell's `&`; what the tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes do not name a test: what is packed or drawn at random differs between workers, which must agree on names."""
    return argname if isinstance(val, bytes) else None


def _left_out(reporter: pytest.TerminalReporter) -> dict[str, list[str]]:
    """The tests left out, by the reason; with xdist too, whose workers send their reports here."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if reason.startswith(LEFT_OUT):
            by_reason[reason.removeprefix(LEFT_OUT)].append(report.nodeid)
        elif _require_all() and not hasattr(report, "wasxfail"):
            by_reason[reason].append(report.nodeid)
    return by_reason


def _require_all() -> bool:
    return os.environ.get("REQUIRE_ALL", "") not in ("", "0")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workerinput") or not _require_all():
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and _left_out(reporter) and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    by_reason = _left_out(terminalreporter)
    if not by_reason:
        return
    terminalreporter.section("LEFT OUT", sep="!", red=_require_all(), yellow=not _require_all(), bold=True)
    for reason, tests in sorted(by_reason.items()):
        terminalreporter.line(f"{len(tests):4d} × {reason}")
        for test in sorted(set(tests)) if _require_all() else ():
            terminalreporter.line(f"       {test}")
    if _require_all():
        terminalreporter.line("REQUIRE_ALL is set, so this run has failed.", red=True, bold=True)
    else:
        terminalreporter.line("With REQUIRE_ALL=1, as in CI, this would fail.")
