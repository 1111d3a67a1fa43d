"""Texts that people posted, of every form from PyTorch 1.0 to 2.14, are read to the byte and judged."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from allocscope.allocator.messages import read_log
from allocscope.cli.oom import as_json

REAL = json.loads(Path(__file__).with_name("real.json").read_text(encoding="utf-8"))
NAMES = [f"{at}-{case['form']}" for at, case in enumerate(REAL)]

MORE_VARIABLE = "ALLOCSCOPE_TEST_OOM_MESSAGES"
"""Names a file of further messages: [{"id", "message", "expect": {"requested", "reserved_unallocated", …}}]."""
MORE_NAMES = {"reserved_unallocated": "unallocated_bytes", "device": "device", "is_oom": "is_oom"}


def read(text):
    return as_json(read_log([text]))["messages"]


@pytest.mark.parametrize("case", REAL, ids=NAMES)
def test_its_figures_are_read_as_printed(case):
    (message,) = read(case["message"])
    assert {name: message[name] for name in case["expect"]} == case["expect"]


@pytest.mark.parametrize("case", REAL, ids=NAMES)
def test_what_the_text_does_not_say_is_not_known(case):
    (message,) = read(case["message"])
    figures = {name for name, value in message.items() if name.endswith("_bytes") and value is not None}
    assert figures <= case["expect"].keys()


@pytest.mark.parametrize("case", REAL, ids=NAMES)
def test_it_is_judged_with_reasons(case):
    (message,) = read(case["message"])
    assert message["verdict"] == case["verdict"]
    assert message["why"]


def within_a_byte(message: dict[str, Any], name: str, value: Any) -> bool:
    """Whether a figure is read as a file of further messages has it."""
    if name == "other_processes":
        known = sorted((p["pid"], p["used_bytes"]) for p in message.get(name, ()) if p["used_bytes"] is not None)
        return known == sorted((pid, used) for pid, used in value if used is not None)
    key = MORE_NAMES.get(name, f"{name}_bytes")
    if key not in message or value is None or message[key] is None:
        return key not in message or message[key] is value
    return bool(-1 <= message[key] - value <= 1)


if MORE_VARIABLE in os.environ:

    def test_further_messages_are_read_within_a_byte():
        cases = json.loads(Path(os.environ[MORE_VARIABLE]).read_text(encoding="utf-8"))
        read_ = {case["id"]: (read(case["message"]) or [{}])[0] for case in cases}
        expected = ((case["id"], name, value) for case in cases for name, value in case["expect"].items())
        assert [(id_, name) for id_, name, value in expected if not within_a_byte(read_[id_], name, value)] == []
