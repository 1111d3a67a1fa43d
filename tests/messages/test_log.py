"""Logs of any size: what counts as one message, whose it is, where it begins, in bounded memory and time."""

import time
import tracemalloc

import pytest

from allocscope.allocator.messages import LogReader, Origin, read_log
from allocscope.allocator.messages.log import MAX_MESSAGES

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.10 GiB of which"
    " 364.31 MiB is free. Process 175080 has 1.46 GiB memory in use. Including non-PyTorch memory, this process has 77.26 GiB"
    " memory in use. Of the allocated memory 72.12 GiB is allocated by PyTorch, and 3.78 GiB is reserved by PyTorch but unallocated."
)
RETRY = (
    "[rank{rank}]:[W812 16:00:28.643448608 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device {rank} while"
    " trying to allocate {asked} bytes (free: 15794176, total: 150111977472).\n"
)
GIB = 1 << 30


def in_bytes(figure):
    return figure and figure.bytes


def brief(messages):
    return [(m.line, m.rank, m.times) for m in messages]


def test_an_exception_that_chained_tracebacks_repeat_is_one():
    text = (
        f"Traceback\n{OOM}\n\nDuring handling of the above exception, another exception occurred:\n\nTraceback\n{OOM}\n"
    )
    assert brief(read_log([text]).messages) == [(2, None, 2)]


def test_a_source_that_becomes_known_later_keeps_its_message():
    """A first copy without a rank; then every rank's own."""
    report = read_log(
        ["".join(f"{whose}{OOM}\n" for whose in ("", "[rank7]: ", "[rank8]: ", "[rank7]: ", "[rank8]: "))]
    )
    assert [(message.rank, message.times) for message in report.messages] == [(7, 3), (8, 2)]


def test_what_a_launcher_prints_again_without_a_rank_is_the_ranks():
    text = f"[rank3]: {OOM}\nE0812 failed (exitcode: 1)\n{OOM}\n"
    assert brief(read_log([text]).messages) == [(1, 3, 2)]


def test_the_same_text_of_two_ranks_is_two():
    assert brief(read_log([f"[rank0]: {OOM}\n[rank1]: {OOM}\n[rank0]: {OOM}\n"]).messages) == [(1, 0, 2), (2, 1, 1)]


def test_another_figure_makes_another_message():
    text = f"{OOM}\n{OOM.replace('2.00 GiB', '4.00 GiB')}\n"
    assert [in_bytes(m.requested) for m in read_log([text]).messages] == [2 * GIB, 4 * GIB]


@pytest.mark.parametrize("cut_first", [True, False])
def test_a_cut_copy_is_the_same_message_and_the_whole_one_is_told(cut_first):
    copies = [OOM[:190], OOM] if cut_first else [OOM, OOM[:190]]
    (message,) = read_log(["\n".join(copies)]).messages
    assert (message.line, message.times, in_bytes(message.unallocated)) == (1, 2, 4058744095)


def test_messages_on_one_line_are_told_apart():
    other = OOM.replace("GPU 3", "GPU 4").replace("364.31", "12.00")
    assert [m.device for m in read_log([f"{OOM} {other}"]).messages] == [3, 4]


def test_retries_are_counted_and_are_no_ooms():
    text = "".join(RETRY.format(rank=rank, asked=asked) for asked in (20971520, 2097152, 41943040) for rank in (0, 1))
    report = read_log([text, f"[rank1]: {OOM}\n"])
    assert report.retries == 6
    assert [(m.origin, m.rank, m.is_oom, m.times, m.line) for m in report.messages] == [
        (Origin.RETRY, 0, False, 3, 1),
        (Origin.RETRY, 1, False, 3, 2),
        (Origin.ALLOCATOR, 1, True, 1, 7),
    ]


@pytest.mark.parametrize(
    ("prefix", "rank", "worker"),
    [
        ("[rank3]: ", 3, None),
        ("[Rank 3] ", 3, None),
        ("rank3: ", 3, None),
        ("3: ", 3, None),
        ("[1,3]<stderr>:", 3, None),
        ("[default1]:[rank3]: ", 3, None),
        ("(RayTrainWorker pid=4711, ip=10.0.0.7) ", None, "RayTrainWorker pid=4711, ip=10.0.0.7"),
        ("(EngineCore_0 pid=7) ERROR 06-09 06:57:48 [core.py:581] ", None, "EngineCore_0 pid=7"),
        ("(VllmWorker rank=2 pid=7) ", 2, "VllmWorker rank=2 pid=7"),
        ("(NPURayWorkerWrapper pid=44419) [rank7]: ", 7, "NPURayWorkerWrapper pid=44419"),
        ("[2026-03-03 03:53:36 TP0] ", None, "TP0"),
        ("[pod/train-worker-0/pytorch] [rank8]: ", 8, "train-worker-0/pytorch"),
        ("\x1b[31mE   [rank3]: ", 3, None),
        ("2024-05-01T12:00:01.123456Z stderr F [rank3]: ", 3, None),
        ("[2024-05-14 03:14:22.881] [PID: 40219] [GPU: 0] FATAL: ", None, "PID: 40219"),
        ("GPU 5 failed: ", None, None),
    ],
)
def test_it_says_whose_a_message_is(prefix, rank, worker):
    (message,) = read_log([f"{prefix}step 1\n{prefix}{OOM}\n"]).messages
    assert (message.rank, message.worker, message.line) == (rank, worker, 2)


@pytest.mark.parametrize(
    "text",
    [
        OOM,
        "DistBackendError: NCCL error in: NCCLUtils.hpp:340, unhandled cuda error\nLast error:\nFailed to CUDA calloc 8388608 bytes",
        "torch.OutOfMemoryError: Allocation on device 5 would exceed allowed memory. (out of memory)\nRequested : 2.00 MiB",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 34359738368 bytes.",
        "Memory cgroup out of memory: Killed process 1234 (python)",
    ],
)
def test_a_message_that_does_not_say_whose_it_is_is_not_the_rank_s_that_spoke_before(text):
    (message,) = read_log([f"[rank4]: step 12\n{text}\n[rank5]: step 12\n"]).messages
    assert message.rank is None


def test_a_rank_in_json_is_one():
    (message,) = read_log(['{"rank": 5, "text": "' + OOM + '"}\n']).messages
    assert message.rank == 5


@pytest.mark.parametrize("size", [1, 7, 64, 4096])
def test_however_a_log_is_cut_into_chunks_it_says_the_same(size):
    text = (
        f"start\n[rank0]: {OOM}\n"
        + "step\n" * 50
        + RETRY.format(rank=1, asked=512)
        + f"{OOM.replace('2.00', '3.00')}\r\nend"
    )
    assert read_log(text[at : at + size] for at in range(0, len(text), size)) == read_log([text])


def test_lines_are_counted_through_what_is_passed_over():
    noise = "2024-05-01 12:00:00 INFO step 1234 loss 1.2345\n"
    report = read_log([noise * 30_000, OOM + "\n", noise * 30_000, "no end of line"])
    assert brief(report.messages) == [(30_001, None, 1)]
    assert report.lines == 60_002


def test_a_line_without_end_is_read():
    (message,) = read_log(["x " * 200_000, OOM, " y" * 200_000]).messages
    assert (message.line, in_bytes(message.unallocated)) == (1, 4058744095)


def test_messages_beyond_a_number_are_counted_only():
    texts = (f"CUDA out of memory. Tried to allocate {at}.00 MiB. GPU 0 has\n" for at in range(1, MAX_MESSAGES + 11))
    report = read_log(texts)
    assert (len(report.messages), report.left_out) == (MAX_MESSAGES, 10)


STORMS = {
    "nothing": "2024-05-01 12:00:00,123 INFO train.py:12 step 1234 loss 1.2345 lr 0.0001 tokens/s 12345\n",
    "retries": RETRY.format(rank=1, asked=20971520),
    "messages": OOM + "\n",
    "talk": "[rank3]: caught out of memory, already allocated 5.00 GiB free\n",
    "one line": "already allocated ",
    "sources": "(W pid={at}) out of memory once\n",
    "white space": "out of memory" + " " * 300 + "\n",
    "backslashes": "\\" * 100_000,
    "many ranks": "[rank{at}]: CUDA out of memory. Tried to allocate 2.00 GiB\n",
    "brackets": "[[((((<<<<" * 30 + "out of memory\n",
}


@pytest.mark.parametrize("name", STORMS)
def test_memory_is_bounded_and_time_grows_with_the_log(name):
    unit = STORMS[name]
    chunk = "".join(unit.replace("{at}", str(at)) for at in range(max(1, 100_000 // len(unit))))
    reader = LogReader()
    reader.feed(chunk)
    tracemalloc.start()
    started = time.process_time()
    for _ in range(3):
        reader.feed(chunk)
    seconds = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    reader.end()
    assert peak < 24 << 20
    assert seconds < 20


def test_a_long_log_keeps_nothing_of_what_it_has_read():
    reader = LogReader()
    chunk = STORMS["nothing"] * (1_000_000 // len(STORMS["nothing"]))
    tracemalloc.start()
    for at in range(6):
        reader.feed(chunk)
        reader.feed(f"[rank{at}]: {OOM}\n")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [m.rank for m in reader.end().messages] == list(range(6))
    assert peak < 8 << 20
