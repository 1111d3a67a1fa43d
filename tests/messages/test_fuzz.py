"""Whatever is in a log: an answer, in bounded time, and figures within what a text can say."""

import json
import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from allocscope.allocator.messages import Verdict, judge, read_log
from allocscope.allocator.messages.figures import ENDLESS_BYTES
from allocscope.allocator.messages.phrases import ANCHORS
from allocscope.cli.oom import as_json
from allocscope.cli.oom_text import as_text

REAL = [case["message"] for case in json.loads(Path(__file__).with_name("real.json").read_text(encoding="utf-8"))]
PIECES = [
    "\n", "\r", "\\n", " ", "[rank3]: ", "(W pid=7) ", "&gt;", "\\u00", "\x1b[31m", "<br>", "{\"log\":\"", "Process 9 has ",
    "5.00 GiB", "99999999999999999999 bytes", "0 bytes", "GPU 0 has a total capacity of ", "is reserved", "(", ";", "\ud800", "\0",
    "٣.٤ GiB", "&#" + "9" * 5000 + ";", "²", "CUDA out of memory.", "Tried to allocate ", "NCCL error in: ", "memory allocation failed with OOM", *ANCHORS,
]  # fmt: skip


@st.composite
def mutated(draw):
    text = draw(st.sampled_from(REAL))
    for _ in range(draw(st.integers(1, 12))):
        at, kind = draw(st.integers(0, len(text))), draw(st.integers(0, 3))
        until = min(at + draw(st.integers(0, 60)), len(text))
        middle = {0: "", 1: draw(st.sampled_from(PIECES)), 2: text[at:until] * 2, 3: draw(st.text(max_size=5))}[kind]
        text = text[:at] + middle + text[until:]
    return text


def answered(text):
    started = time.process_time()
    report = read_log([text])
    told = as_text(report)
    assert json.loads(json.dumps(as_json(report)))["messages"] is not None
    assert told
    assert time.process_time() - started < 5
    return report


def sound(report):
    for message in report.messages:
        judgement = judge(message)
        assert isinstance(judgement.verdict, Verdict)
        assert judgement.reasons
        assert message.line >= 1
        for name in ("requested", "total", "free", "allocated", "unallocated"):
            figure = getattr(message, name)
            if figure is not None:
                assert 0 <= figure.low_bytes <= figure.bytes <= figure.high_bytes
                assert figure.bytes < ENDLESS_BYTES


@settings(max_examples=250, deadline=None)
@given(mutated())
def test_mutated_messages_are_answered(text):
    sound(answered(text))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=120).map("".join))
def test_pieces_of_messages_in_any_order_are_answered(text):
    sound(answered(text))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=400))
def test_any_text_is_answered(text):
    sound(answered(text))
