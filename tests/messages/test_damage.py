"""Whatever terminals, launchers, loggers and web pages did to a text, it says the same."""

import html
import json
import textwrap
from pathlib import Path

import pytest

from allocscope.allocator.messages import read_log
from allocscope.cli.oom import as_json

REAL = [case["message"] for case in json.loads(Path(__file__).with_name("real.json").read_text(encoding="utf-8"))]
FIGURES = ("is_oom", "device", "other_processes")


def said(text):
    messages = as_json(read_log([text]))["messages"]
    return [{k: v for k, v in m.items() if k.endswith("_bytes") or k in FIGURES} for m in messages]


def broken(text, width):
    """Broken at a width, in the middle of words and numbers."""
    return "\n".join(text[at : at + width] for at in range(0, len(text), width))


def each_line(prefix, width=70):
    return lambda text: "\n".join(prefix + line for line in broken(text, width).split("\n"))


DAMAGE = {
    "80 columns": lambda text: broken(text, 80),
    "20 columns": lambda text: broken(text, 20),
    "7 columns": lambda text: broken(text, 7),
    "Windows line ends": lambda text: broken(text, 80).replace("\n", "\r\n"),
    "filled and indented": lambda text: textwrap.indent(textwrap.fill(text, 50), "        "),
    "a rank on its first line only": lambda text: "[rank3]: " + broken(text, 70),
    "Ray": each_line("(RayTrainWorker pid=4711, ip=10.0.0.7) "),
    "vLLM": each_line("(EngineCore_0 pid=7) ERROR 06-09 06:57:48 [core.py:581] "),
    "SGLang": each_line("[2026-03-03 03:53:36 TP0] "),
    "srun --label": each_line("12: "),
    "mpirun": each_line("[1,3]<stderr>:"),
    "docker compose": each_line("trainer-1  | "),
    "kubelet": each_line("2024-05-01T12:00:01.123456Z stderr F "),
    "a logger": each_line("2024-05-01 12:00:00,123 - ERROR - "),
    "pytest": each_line("E   "),
    "a quote in a quote": each_line("> > "),
    "a box": lambda text: "\n".join(f"│ {line:<78} │" for line in broken(text, 70).split("\n")),
    "HTML": lambda text: html.escape(text).replace("\n", "<br>").replace(" ", "&nbsp;"),
    "HTML twice": lambda text: html.escape(html.escape(text)),
    "JSON": lambda text: json.dumps({"log": f"Traceback\n{text}\n", "stream": "stderr", "time": "2024-05-01T12:00:01Z"}),
    "JSON in JSON": lambda text: json.dumps({"level": "error", "exc": json.dumps(f"Traceback\n{text}\n")}),
    "colours": lambda text: "\x1b[31m" + text.replace("memory", "\x1b[1mmem\x1b[0mory") + "\x1b[0m",
    "a code block": lambda text: f"```\n{text}\n```",
    "bold, escaped": lambda text: f"**{text.replace('_', chr(92) + '_')}**",
    "lower case": lambda text: text.lower(),
    "figures of others around it": lambda text: f"{'GPU memory 5.0 GiB free, 2 GiB cached' + chr(10):>50}{text}\n" + "3 GiB free\n" * 9,
    "chained": lambda text: f"{text}\n\nDuring handling of the above exception, another exception occurred:\n\n{text}\n",
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_the_same_figures_come_out(name):
    for text in REAL:
        assert said(DAMAGE[name](text)) == said(text), text[:200]


FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 572.00 MiB. GPU 0 has a total capacity of 39.49 GiB of which"
    " 321.31 MiB is free. Process 372 has 414.00 MiB memory in use. Including non-PyTorch memory, this process has 37.46 GiB"
    " memory in use. Of the allocated memory 36.04 GiB is allocated by PyTorch, and 321.37 MiB is reserved by PyTorch but"
    " unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)
WHOLE = {
    "requested_bytes": 599785472,
    "total_bytes": 42402064630,
    "free_bytes": 336917955,
    "this_process_bytes": 40222368727,
    "allocated_bytes": 38697655337,
    "unallocated_bytes": 336980869,
}


@pytest.mark.parametrize("kept", range(46, len(FULL) + 1, 3))
def test_a_cut_tail_leaves_what_it_lost_unknown_and_nothing_wrong(kept):
    (message,) = said(f"Traceback\n{FULL[:kept]}\nstep 7: 12.5 GiB free\n")
    known = {name: value for name, value in message.items() if name.endswith("_bytes") and value is not None}
    assert known.items() <= WHOLE.items()
    amount = {
        "requested_bytes": "572.00 MiB",
        "total_bytes": "39.49 GiB",
        "unallocated_bytes": "321.37 MiB is reserved",
    }
    assert all((name in known) == (printed in FULL[:kept]) for name, printed in amount.items())


@pytest.mark.parametrize("lost", [130, 200, 260])
def test_of_a_lost_head_what_is_left_is_read(lost):
    (message,) = said(FULL[lost:])
    assert message["requested_bytes"] is None
    assert message["unallocated_bytes"] == 336980869


def test_messages_of_ranks_that_interleave_are_told_apart():
    zero = [f"[rank0]: {line}" for line in broken(FULL, 60).split("\n")]
    other = FULL.replace("572.00", "20.00").replace("GPU 0", "GPU 1").replace("321.31", "12.25")
    one = [f"[rank1]: {line}" for line in broken(other, 47).split("\n")]
    lines = [line for pair in zip(one, [*zero, *[""] * (len(one) - len(zero))], strict=True) for line in pair]
    found = as_json(read_log(["\n".join(lines)]))["messages"]
    assert [(m["rank"], m["device"], m["requested_bytes"], m["free_bytes"]) for m in found] == [
        (1, 1, 20971520, 12845056),
        (0, 0, 599785472, 336917955),
    ]
