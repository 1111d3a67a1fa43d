"""A service's command line: file, environment and flags, and what is wrong with them in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from allocscope.cli.settings import UnusableError, read_settings
from allocscope.model.settings import host_port, setting


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a service that a test makes up."""

    node: str = "here"
    """The node's name: 100 % of it."""

    interval_s: float = setting(1.0, at_least=0.1)
    """How often."""

    listen: str = setting("127.0.0.1:7", check=host_port)
    """Where it is asked."""

    spool: Path | None = None
    """Its folder."""

    nvml: bool = True
    """Whether it reads NVML."""

    webhook: tuple[str, ...] = ()
    """Who is told."""

    log_level: str = setting("info", choices=("debug", "info"))
    """What is logged."""


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    for name in ("CONFIG", "NODE", "INTERVAL_S"):
        monkeypatch.delenv(f"ALLOCSCOPE_{name}", raising=False)


def read(*arguments: str) -> Settings:
    return read_settings(Settings, list(arguments), command="service", about="serves")


def test_flags_outweigh_variables_and_those_the_file(tmp_path, monkeypatch):
    (tmp_path / "a.toml").write_text('node = "file"\ninterval_s = 2\n')
    assert read() == Settings("here", 1.0)
    monkeypatch.setenv("ALLOCSCOPE_CONFIG", f"{tmp_path}/a.toml")
    assert read() == Settings("file", 2.0)
    monkeypatch.setenv("ALLOCSCOPE_NODE", "variable")
    assert read("--interval-s", "3") == Settings("variable", 3.0)
    assert read("--node", "flag") == Settings("flag", 2.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "cannot read the settings file FILE: No such file or directory"),
        ("node = ", "the settings file FILE is not TOML: Invalid value (at end of document)"),
        (
            "nodes = 1\ninterval_s = 0",
            """2 problem(s) with the settings; the file is FILE
  nodes is not a setting, but is in the file (did you mean 'node'?)
  interval_s is 0: must be at least 0.1""",
        ),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text, expected):
    file = tmp_path / "a.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UnusableError) as caught:
        read("--config", str(file))
    assert str(caught.value) == expected.replace("FILE", str(file))


def test_a_variable_that_is_nearly_one_is_warned_of(monkeypatch, capsys):
    monkeypatch.setenv("ALLOCSCOPE_INTERVALL_S", "3")
    assert read() == Settings()
    assert capsys.readouterr().err == (
        "allocscope service: ALLOCSCOPE_INTERVALL_S is no setting; did you mean ALLOCSCOPE_INTERVAL_S?\n"
    )


def test_help_tells_what_each_setting_means_how_its_value_looks_and_what_holds_without(capsys):
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert told[told.index("--config FILE settings in TOML") + 1 :][:8] == [
        "--node NODE The node's name: 100 % of it. (default: here)",
        "--interval-s SECONDS How often. (default: 1)",
        "--listen HOST:PORT Where it is asked. (default: 127.0.0.1:7)",
        "--spool PATH Its folder.",
        "--nvml {true,false} Whether it reads NVML. (default: true)",
        "--webhook WEBHOOK Who is told. (may be given several times)",
        "--log-level {debug,info}",
        "What is logged. (default: info)",
    ]
