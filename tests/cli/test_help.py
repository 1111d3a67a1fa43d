"""What --help says: each option and argument of each command is explained, and a shortened option is none."""

from __future__ import annotations

import re

import pytest

from allocscope.cli.app import COMMANDS, main

WITH_OPTIONS = [name for name in COMMANDS if name != "run"]
"""`run` has a text of its own."""


def help_of(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_each_option_and_argument_is_explained(name, capsys, monkeypatch):
    told = help_of(name, capsys, monkeypatch).partition("\n\n")[2]
    lines = told.splitlines()
    entries = [at for at, line in enumerate(lines) if re.match(r"  (-|[A-Z])", line)]
    assert entries
    unexplained = [
        lines[at]
        for at in entries
        if not re.search(r"\S  +\S", lines[at]) and not (at + 1 < len(lines) and lines[at + 1].startswith(" " * 10))
    ]
    assert unexplained == []


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_a_shortened_option_is_none(name, capsys, monkeypatch):
    """What is added later must not change what a script says today."""
    option = max(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", help_of(name, capsys, monkeypatch), re.MULTILINE), key=len)
    with pytest.raises(SystemExit) as ended:
        main([name, option[:-1], "x", "x"])
    assert ended.value.code == 2
    assert re.search(rf"unrecognized arguments: (.* )?{option[:-1]}( |\n)", capsys.readouterr().err)
