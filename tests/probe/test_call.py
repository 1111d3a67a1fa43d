"""One gRPC call over HTTP/2, byte by byte: what the other side may do, and what it may not."""

import struct

import pytest

from allocscope.probe.call import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Call,
    CallBroken,
)


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def settings(**values: int) -> bytes:
    names = {"window": INITIAL_WINDOW_SIZE, "frame": MAX_FRAME_SIZE}
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", names[name], value) for name, value in values.items()))


def room(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size))


def message(payload: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(payload)) + payload


def greeted() -> Call:
    """A call whose beginning is out, and the other side's settings in."""
    call = Call("/s/M")
    answers(call, settings())
    call.outgoing.clear()
    return call


def answers(call: Call, *data: bytes) -> list[bytes]:
    return [answer for each in data for answer in call.receive(each)]


def frames_out(call: Call) -> list[tuple[int, int, int, bytes]]:
    data, found = bytes(call.outgoing).removeprefix(PREFACE), []
    while data:
        size = int.from_bytes(data[:3], "big")
        found.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
        data = data[9 + size :]
    call.outgoing.clear()
    return found


def test_it_begins_with_the_preface_settings_and_the_requests_headers():
    call = Call("/s/M")
    assert call.outgoing.startswith(PREFACE)
    (first, *_), (kind, flags, stream, block) = frames_out(call)
    assert (first, kind, flags, stream) == (SETTINGS, HEADERS, END_HEADERS, 1)
    assert b"\x00\x05:path\x04/s/M" in block
    assert b"\x00\x02te\x08trailers\x00\x0ccontent-type\x10application/grpc" in block


def test_messages_go_out_with_their_length():
    call = greeted()
    call.send(b"abc")
    call.send(b"")
    assert frames_out(call) == [(DATA, 0, 1, b"\0\0\0\0\3abc"), (DATA, 0, 1, b"\0\0\0\0\0")]


def test_the_end_comes_after_the_last_message():
    call = greeted()
    call.send(b"x" * 100_000)
    call.end()
    assert frames_out(call)[-1][:2] == (DATA, 0)
    answers(call, room(0, 100_000), room(1, 100_000))
    assert frames_out(call)[-1] == (DATA, END_STREAM, 1, b"")


def test_no_more_goes_out_than_both_windows_allow():
    call = greeted()
    call.send(b"x" * 200_000)
    assert sum(len(f[3]) for f in frames_out(call)) == 65_535
    answers(call, room(1, 1_000_000))
    assert frames_out(call) == []
    answers(call, room(0, 10))
    assert [len(f[3]) for f in frames_out(call)] == [10]
    answers(call, room(0, 1_000_000))
    assert sum(len(f[3]) for f in frames_out(call)) == 200_005 - 65_535 - 10
    assert call.backlog_bytes == 0


def test_a_frame_is_no_longer_than_the_other_side_takes():
    call = greeted()
    call.send(b"x" * 40_000)
    assert [len(f[3]) for f in frames_out(call)] == [16_384, 16_384, 40_005 - 2 * 16_384]
    answers(call, settings(frame=30_000), room(0, 40_000), room(1, 40_000))
    call.send(b"x" * 40_000)
    assert [len(f[3]) for f in frames_out(call)][1:] == [30_000, 10_005]


def test_settings_may_change_the_window_of_a_stream_that_is_open():
    call = greeted()
    call.send(b"x" * 65_530)
    frames_out(call)
    answers(call, settings(window=10))  # it has sent more than that: 65,525 must come back first
    call.send(b"y" * 5)
    answers(call, room(0, 1000), room(1, 65_525))
    assert [f for f in frames_out(call) if f[0] == DATA] == []
    answers(call, room(1, 10))
    assert [len(f[3]) for f in frames_out(call)] == [10]


def test_settings_and_pings_are_acknowledged_and_acknowledgements_are_not():
    call = greeted()
    answers(
        call, settings(), frame(PING, payload=b"12345678"), frame(SETTINGS, ACK), frame(PING, ACK, payload=b"12345678")
    )
    assert frames_out(call) == [(SETTINGS, ACK, 0, b""), (PING, ACK, 0, b"12345678")]


def test_answers_come_however_they_are_cut():
    data = b"".join(
        [
            settings(),
            frame(HEADERS, END_HEADERS, 1, b"never decoded"),
            frame(DATA, 0, 1, message(b"one") + message(b"two")[:3]),
            frame(DATA, 0, 1, message(b"two")[3:]),
            frame(DATA, PADDED, 1, b"\2" + message(b"three") + b"\0\0"),
        ]
    )
    for size in (1, 7, len(data)):
        call = Call("/s/M")
        pieces = (data[start : start + size] for start in range(0, len(data), size))
        assert answers(call, *pieces) == [b"one", b"two", b"three"]


def test_what_was_read_may_be_sent_again():
    call = greeted()
    answers(call, frame(DATA, 0, 1, message(b"abc")))
    assert frames_out(call) == [(WINDOW_UPDATE, 0, 0, b"\0\0\0\x08"), (WINDOW_UPDATE, 0, 1, b"\0\0\0\x08")]


@pytest.mark.parametrize("last", [frame(HEADERS, END_STREAM, 1, b"x"), frame(DATA, END_STREAM, 1)])
def test_the_other_side_ends_the_call(last):
    call = greeted()
    answers(call, frame(HEADERS, END_STREAM, 3, b"of no stream of ours"))
    assert not call.is_over
    answers(call, last)
    assert call.is_over


def test_what_it_does_not_know_it_passes_over():
    call = greeted()
    assert answers(call, frame(CONTINUATION, 0, 1, b"x"), frame(99, 5, 7, b"x"), frame(DATA, 0, 3, message(b"x"))) == []
    assert frames_out(call) == []


def test_a_server_that_goes_away_in_order_finishes_the_call_first():
    call = greeted()
    assert answers(call, frame(GOAWAY, payload=struct.pack(">II", 1, 0)), frame(DATA, 0, 1, message(b"last"))) == [
        b"last"
    ]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", "does not speak HTTP/2"),
        (frame(DATA, 0, 1, b"before any settings"), "does not speak HTTP/2"),
        (settings() + b"\xff\xff\xff\0\0\0\0\0\0", "does not speak HTTP/2"),
        (settings() + frame(RST_STREAM, 0, 1, b"\0\0\0\x08"), "reset the stream .HTTP/2 error 8."),
        (settings() + frame(GOAWAY, payload=struct.pack(">II", 0, 11)), "went away"),
        (settings() + frame(DATA, 0, 1, b"\1" + message(b"x")[1:]), "cannot be read"),
        (settings() + frame(DATA, 0, 1, b"\0\xff\xff\xff\xff"), "cannot be read"),
    ],
)
def test_what_cannot_be_gone_on_with_breaks_the_call(data, why):
    with pytest.raises(CallBroken, match=why):
        answers(Call("/s/M"), data)
