"""A service's command line: file, environment and flags, and what is wrong with them in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from allocscope.cli.settings import UnusableError, read_settings
from allocscope.model.settings import setting


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a service that a test makes up."""

    node: str = "here"
    """The node's name: 100 % of it."""

    interval_s: float = setting(1.0, at_least=0.1)
    """How often."""


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
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


def test_help_tells_what_each_setting_means(capsys):
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    assert "The node's name: 100 % of it." in capsys.readouterr().out
