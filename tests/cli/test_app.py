"""The one command: what it says of itself, and to those who mistype."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from allocscope.cli.app import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_a_module_that_says_what_it_does(name: str) -> None:
    command = import_module(f"allocscope.cli.{name}")
    assert COMMANDS[name][0] == command.HELP
    assert callable(command.main)


def test_without_a_command_it_says_how_it_is_used_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: allocscope COMMAND" in capsys.readouterr().out


def test_a_mistyped_command_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dameon"]) == 2
    assert "there is no command 'dameon' (did you mean 'daemon'?)" in capsys.readouterr().err


def test_it_names_its_version_as_a_module_too() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "allocscope.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "0.1.0"


@pytest.mark.parametrize("arguments", [["--help"], ["oom", "-"], ["oom", "--help"]])
def test_a_reader_that_has_gone_is_no_error(arguments: list[str]) -> None:
    """As of `| head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    answer = subprocess.run(
        [sys.executable, "-m", "allocscope.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_where_the_locales_letters_are_few_it_still_answers() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "allocscope.cli", "--help"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "usage: allocscope COMMAND [ARGUMENT?]" in answer.stdout


NOT_INSTALLED = """
import sys
sys.modules["uvicorn"] = None
from allocscope.cli.app import main
sys.exit(main(["collector", "--database", "sqlite:///never-made.db", "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]))
"""


def test_a_command_whose_extra_is_not_installed_says_which_one_to_install(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", NOT_INSTALLED], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 1
    assert (
        answer.stderr.strip()
        == "allocscope collector: uvicorn is not installed; in a clone of Allocscope: pip install '.[collector]'"
    )


STARTS_WITHOUT = """
import sys
for name in ("typer", "rich", "httpx", "numpy", "sqlalchemy", "prometheus_client", "structlog"):
    sys.modules[name] = None
from allocscope.cli.app import main
sys.exit(main(["{name}", "--help"]))
"""


@pytest.mark.parametrize("name", ["run", "play", "replay", "oom", "log", "inspect", "rules"])
def test_what_a_job_needs_works_with_the_probes_own_dependencies(name: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", STARTS_WITHOUT.format(name=name)], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr


def test_ctrl_c_ends_it_without_a_traceback(httpserver: HTTPServer) -> None:
    asked, ended = threading.Event(), threading.Event()

    def silent(_: Request) -> Response:
        asked.set()
        ended.wait(60)
        return Response("{}")

    httpserver.expect_request("/api/v1/jobs").respond_with_handler(silent)
    command = [sys.executable, "-m", "allocscope.cli", "jobs", "--url", httpserver.url_for("/")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as asking:
        assert asked.wait(60)
        asking.send_signal(signal.SIGINT)
        _, said = asking.communicate(timeout=60)
        ended.set()
    assert (asking.returncode, said) == (130, "")
