"""`allocscope run`: becomes the command, with the probe in it; what cannot be said is said as a shell would."""

import os
import socket
import stat
import sys
from pathlib import Path

import pytest

from allocscope.cli import run


class Became(Exception):  # noqa: N818 (not an error)
    """What exec would have done."""

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        super().__init__(command)
        self.command, self.environ = command, environ


@pytest.fixture
def becomes(monkeypatch):
    def execvpe(file, command, environ):
        assert file == command[0]
        raise Became(command, environ)

    def main(*arguments: str) -> Became:
        monkeypatch.setattr(os, "execvpe", execvpe)
        with pytest.raises(Became) as caught:
            run.main(list(arguments))
        return caught.value

    return main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def test_a_command_is_run_as_it_is(becomes):
    assert becomes("python", "-m", "trainer", "--job", "its-own").command == [
        "python",
        "-m",
        "trainer",
        "--job",
        "its-own",
    ]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["train.py", "--lr", "1"], [sys.executable, "train.py", "--lr", "1"]),
        (["--", "train.py"], [sys.executable, "train.py"]),
        (["--job", "j", "--", "torchrun", "--nproc", "8", "train.py"], ["torchrun", "--nproc", "8", "train.py"]),
        (["no-such.py"], ["no-such.py"]),
    ],
)
def test_a_script_is_run_by_this_python(becomes, folder, arguments, command):
    assert becomes(*arguments).command == command


def test_a_script_that_is_a_program_is_run_as_one(becomes, folder):
    (folder / "train.py").chmod(stat.S_IRWXU)
    assert becomes("./train.py").command == ["./train.py"]


def test_the_hook_comes_before_the_jobs_own_path(becomes, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/a::/b")
    first = becomes("x").environ["PYTHONPATH"].split(":")
    assert first[1:] == ["/a", "", "/b"]
    assert (Path(first[0]) / "sitecustomize.py").is_file()
    monkeypatch.setenv("PYTHONPATH", ":".join(first))
    assert becomes("x").environ["PYTHONPATH"].split(":") == first


@pytest.mark.parametrize("own", ["", None])
def test_no_path_of_the_jobs_own_stays_none(becomes, monkeypatch, own):
    """An empty entry would put the current folder on the path."""
    if own is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", own)
    assert ":" not in becomes("x").environ["PYTHONPATH"]


@pytest.mark.parametrize("arguments", [["--job", "j", "--socket", "/s", "x"], ["--job=j", "--socket=/s", "--", "x"]])
def test_options_become_environment(becomes, arguments):
    became = becomes(*arguments)
    assert (became.environ["ALLOCSCOPE_JOB"], became.environ["ALLOCSCOPE_SOCKET"], became.command) == ("j", "/s", ["x"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no command was given"),
        (["--"], "no command was given"),
        (["--job"], "--job wants a value"),
        (["--job=", "x"], "--job wants a value"),
        (["--jobs", "j", "x"], "there is no option --jobs"),
        (["-m", "trainer"], "there is no option -m"),
    ],
)
def test_what_cannot_be_meant_is_said_with_the_usage(capsys, arguments, text):
    assert run.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"allocscope run: {text}")
    assert "usage: allocscope run" in error


def test_help_is_no_error(capsys):
    assert run.main(["--help"]) == 0
    assert "python -I" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ("no-such-command", 127, "allocscope run: no-such-command: there is no such command\n"),
        ("no-such.py", 127, "allocscope run: no-such.py: there is no such file\n"),
        ("/etc", 126, "allocscope run: /etc: Permission denied\n"),
    ],
)
def test_a_command_that_cannot_be_run_is_named(capsys, folder, monkeypatch, command, status, text):
    monkeypatch.setenv("ALLOCSCOPE_DISABLE", "1")
    assert run.main([command]) == status
    assert capsys.readouterr().err == text


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, "allocscope run: no daemon at nobody: the job runs, its memory is not reported until one is there\n"),
        ({"ALLOCSCOPE_DISABLE": "1"}, ""),
    ],
)
def test_a_daemon_that_is_not_there_is_told_of_before_the_job_begins(
    becomes, folder, monkeypatch, capsys, environ, text
):
    monkeypatch.delenv("ALLOCSCOPE_DISABLE", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    becomes("--socket", "nobody", "x")
    assert capsys.readouterr().err == text


def test_a_daemon_that_is_there_is_nothing_to_tell_of(becomes, folder, capsys):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("d.sock")
        becomes("--socket", "d.sock", "x")
    assert capsys.readouterr().err == ""
