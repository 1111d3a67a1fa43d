"""Settings: three sources in one order, typed, and every problem at once."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

import pytest

from allocscope.model.settings import Problem, SettingsError, docstrings, host_port, near_misses, read, setting


@dataclass(frozen=True, slots=True)
class Settings:
    node: str
    interval_s: float = setting(1.0, at_least=0.1, at_most=60)
    spool_limit_bytes: int = setting(1000, at_least=10)
    spool: Path = Path("/var/lib/x")
    listen: str | None = setting(None, check=host_port)
    nvml: bool = True
    hosts: tuple[str, ...] = ()
    log_format: str = setting("json", choices=("json", "console"))
    token: str | None = setting(None, secret=True, check=lambda value: "must be longer" if len(value) < 9 else None)


def test_flags_outweigh_the_environment_and_that_the_file_and_that_the_default():
    got = read(
        Settings,
        file={"node": "file", "interval_s": 2, "spool_limit_bytes": 20, "spool": "/file"},
        environ={"ALLOCSCOPE_NODE": "environment", "ALLOCSCOPE_INTERVAL_S": "3.5"},
        flags={"node": "flag", "interval_s": None},
    )
    assert got == Settings("flag", 3.5, 20, Path("/file"))


def test_text_is_read_as_the_fields_type():
    got = read(
        Settings,
        file=None,
        environ={
            "ALLOCSCOPE_NODE": "a",
            "ALLOCSCOPE_NVML": "off",
            "ALLOCSCOPE_HOSTS": "a, b,",
            "ALLOCSCOPE_LISTEN": "[::1]:0",
            "ALLOCSCOPE_SPOOL": "",
        },
        flags={"spool_limit_bytes": "77", "log_format": "console"},
    )
    assert got == Settings("a", 1.0, 77, Path("/var/lib/x"), "[::1]:0", False, ("a", "b"), "console")


def test_every_problem_is_reported_together_with_what_would_be_right():
    with pytest.raises(SettingsError) as caught:
        read(
            Settings,
            file={"intervall_s": 1, "nvml": "yes", "hosts": [1], "log_format": "xml", "token": "hunter2", "zzz": 1},
            environ={"ALLOCSCOPE_INTERVAL_S": "0", "ALLOCSCOPE_LISTEN": "9464"},
            flags={"spool_limit_bytes": "1e3"},
        )
    assert caught.value.problems == (
        Problem("intervall_s", MISSING, "is not a setting, but is in the file", "interval_s"),
        Problem("zzz", MISSING, "is not a setting, but is in the file"),
        Problem("node", MISSING, "must be given, as --node, ALLOCSCOPE_NODE, or in the file"),
        Problem("ALLOCSCOPE_INTERVAL_S", "0", "must be from 0.1 to 60"),
        Problem("--spool-limit-bytes", "1e3", "must be a whole number"),
        Problem(
            "ALLOCSCOPE_LISTEN", "9464", "must be HOST:PORT, with a PORT from 0 to 65535 and an IPv6 HOST in brackets"
        ),
        Problem("nvml", "yes", "must be true or false"),
        Problem("hosts", [1], "must be a list of texts"),
        Problem("log_format", "xml", "must be one of json, console"),
        Problem("token", "…", "must be longer"),
    )


def test_a_bound_is_told_to_the_last_digit():
    @dataclass(frozen=True)
    class Sizes:
        least_bytes: int = setting(1 << 30, at_least=1 << 20)

    with pytest.raises(SettingsError, match="must be at least 1048576"):
        read(Sizes, file={"least_bytes": 1}, environ={}, flags={})


def test_a_problem_reads_as_a_sentence():
    problems = [Problem("intervall_s", MISSING, "is not a setting", "interval_s"), Problem("nvml", 7, "must be true")]
    assert str(SettingsError(problems)) == (
        "intervall_s is not a setting (did you mean 'interval_s'?)\nnvml is 7: must be true"
    )


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("interval_s", True, "must be a number"),
        ("interval_s", float("nan"), "must be a number"),
        ("interval_s", "1", "must be a number"),
        ("spool_limit_bytes", 10.5, "must be a whole number"),
        ("spool_limit_bytes", 9, "must be at least 10"),
        ("spool", 5, "must be a path, as text"),
        ("spool", "", "must be a path, not empty"),
        ("node", 5, "must be text"),
        ("node", {"a": 1}, "must be text"),
    ],
)
def test_a_files_values_keep_their_own_types(key, value, right):
    with pytest.raises(SettingsError) as caught:
        read(Settings, file={"node": "a", key: value}, environ={}, flags={})
    assert [problem.right for problem in caught.value.problems] == [right]


def test_a_variable_that_is_nearly_a_setting_is_worth_a_warning_and_no_more():
    environ = {"ALLOCSCOPE_INTERVALL_S": "1", "ALLOCSCOPE_JOB": "x", "ALLOCSCOPE_NODES": "y", "PATH": "/"}
    assert near_misses(Settings, environ, known=("ALLOCSCOPE_NODES",)) == (
        "ALLOCSCOPE_INTERVALL_S is no setting; did you mean ALLOCSCOPE_INTERVAL_S?",
    )


def test_the_docstring_under_a_field_is_its_help():
    source = 'class A:\n    """Of the class."""\n    x: int = 1\n    """How\n    many."""\n    y: int = 2\n    z: int\n'
    assert docstrings(source) == {"x": "How many."}


@pytest.mark.parametrize("value", ["1:2:3", ":80", "host", "host:", "host:70000", "host:-1", "host:８０"])
def test_what_is_no_host_and_port(value):
    assert host_port(value) == "must be HOST:PORT, with a PORT from 0 to 65535 and an IPv6 HOST in brackets"
