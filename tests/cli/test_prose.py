"""Sentences fit the terminal, and stay whole where there is none."""

import io
import sys

import pytest

from allocscope.cli.prose import fold, prose_width


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("out", "width"),
    [
        pytest.param(Terminal(), 72, id="a terminal"),
        pytest.param(io.StringIO(), None, id="a pipe"),
        pytest.param(None, None, id="closed"),
    ],
)
def test_only_a_terminal_has_a_width(monkeypatch, out, width):
    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setattr(sys, "stdout", out)
    assert prose_width() == width


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("  one two three four", "  one two\n    three\n    four"),
        ("one two", "one two"),
        ("a-word-that-is-longer than it", "a-word-that-is-longer\n  than it"),
        ("\x1b[31;1mone two\x1b[0m three", "\x1b[31;1mone two\x1b[0m\n  three"),
        ("a  b", "a  b"),
    ],
)
def test_lines_are_folded_between_words_and_the_rest_indented(text, folded):
    assert fold(text, 10) == folded
    assert fold(text, None) == text
