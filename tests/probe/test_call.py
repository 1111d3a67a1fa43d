"""One gRPC call over HTTP/2, byte by byte: what the other side may do, and what it may not."""

import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

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
    LARGEST_ANSWER_BYTES,
    LARGEST_BACKLOG_BYTES,
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
from allocscope.proto.v1.probe_service_pb2 import AttachRequest
from tests.probe.peer import frame, message, room
from tests.probe.receiver import LONG_S, Receiver


def settings(**values: int) -> bytes:
    names = {"window": INITIAL_WINDOW_SIZE, "frame": MAX_FRAME_SIZE}
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", names[name], value) for name, value in values.items()))


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
        (settings() + frame(RST_STREAM, 0, 1, b"\xff" * 16_384), "a frame of type 3 has 16384 bytes"),
        (frame(SETTINGS, payload=b"\0\5\0\0"), "a frame of type 4 has 4 bytes"),
        (settings() + frame(PING, payload=b"1234567"), "a frame of type 6 has 7 bytes"),
        (settings() + room(1, 5)[:-1].replace(b"\0\0\4", b"\0\0\3", 1), "a frame of type 8 has 3 bytes"),
        (settings() + frame(DATA, PADDED, 1), "shorter than its padding"),
        (settings() + frame(DATA, PADDED, 1, b"\4abc"), "shorter than its padding"),
        (settings() + frame(GOAWAY, payload=struct.pack(">II", 0, 11)), "went away"),
        (settings() + frame(DATA, 0, 1, b"\1" + message(b"x")[1:]), "cannot be read"),
        (settings() + frame(DATA, 0, 1, b"\0\xff\xff\xff\xff"), "cannot be read"),
    ],
)
def test_what_cannot_be_gone_on_with_breaks_the_call(data, why):
    with pytest.raises(CallBroken, match=why):
        answers(Call("/s/M"), data)


def test_a_frame_of_all_padding_is_an_empty_one():
    assert answers(greeted(), frame(DATA, PADDED, 1, b"\3\0\0\0")) == []


def test_no_setting_makes_a_frame_that_http_2_does_not_have():
    call = greeted()
    answers(call, settings(frame=2**32 - 1, window=2**31 - 1), room(0, 2**31 - 1))
    call.outgoing.clear()
    call.send(b"x" * (17 << 20))
    assert [len(f[3]) for f in frames_out(call)] == [2**24 - 1, (17 << 20) + 5 - (2**24 - 1)]


def test_one_who_asks_and_asks_and_reads_nothing_is_not_answered_for_ever():
    call = greeted()
    pings = frame(PING, payload=b"12345678") * 1000
    with pytest.raises(CallBroken, match="does not read"):
        answers(call, *[pings] * 1000)
    assert len(call.outgoing) <= LARGEST_BACKLOG_BYTES + len(pings)


# whatever comes


def recorded(path: Path) -> bytes:
    """What a real gRPC server says in a call of some messages."""
    heard, call = b"", Call("/allocscope.proto.v1.ProbeService/Attach")
    with Receiver(path) as receiver, socket.socket(socket.AF_UNIX) as connection:
        receiver.say(refused=("no", "x" * 3000))
        connection.settimeout(LONG_S)
        connection.connect(str(path))
        for number in range(1, 6):
            request = AttachRequest(sent_us=1)
            request.event.sequence = number
            call.send(request.SerializeToString())
        call.end()
        while not call.is_over:
            connection.sendall(call.outgoing)
            call.outgoing.clear()
            data = connection.recv(1 << 16)
            heard += data
            for _ in call.receive(data):
                pass
    return heard


def mutated(traffic: bytes, chance: random.Random) -> bytes:
    """Bytes and whole pieces changed, doubled, left out, put elsewhere."""
    data = bytearray(traffic)
    for _ in range(chance.randint(1, 8)):
        start = chance.randrange(len(data) + 1)
        piece = data[start : start + chance.choice((1, 1, 4, 9, 100))]
        match chance.randrange(5):
            case 0:
                data[start : start + len(piece)] = chance.randbytes(len(piece))
            case 1:
                del data[start : start + len(piece)]
            case 2:
                data[start:start] = piece * chance.choice((1, 2, 50))
            case 3:
                elsewhere = chance.randrange(len(data) + 1)
                data[elsewhere:elsewhere] = piece
            case _:
                data[start : start + len(piece)] = bytes(chance.choice((0, 255)) for _ in piece)
    return bytes(data)


def pieces(data: bytes, chance: random.Random) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        size = chance.choice((1, 9, 100, 1 << 16))
        yield data[start : start + size]
        start += size


def hear(call: Call, data: bytes, chance: random.Random) -> None:
    """Take it in, and nothing but CallBroken; what is held stays within bounds."""
    try:
        for piece in pieces(data, chance):
            for answer in call.receive(piece):
                assert len(answer) <= LARGEST_ANSWER_BYTES
            assert len(call._read) < 9 + 16_384 + len(piece)
            assert len(call._answers) <= LARGEST_ANSWER_BYTES + 5
            assert len(call.outgoing) <= LARGEST_BACKLOG_BYTES + 3 * len(piece) + 1000
    except CallBroken:
        pass


def test_whatever_becomes_of_a_real_servers_words_only_the_call_breaks(tmp_path):
    traffic, chance, broken = recorded(tmp_path / "d.sock"), random.Random(5), 0
    assert len(traffic) > 3000
    for _ in range(3000):
        call = Call("/s/M")
        call.send(b"x" * chance.choice((0, 100_000)))
        data = mutated(traffic, chance)
        hear(call, data, chance)
        broken += not call.is_over
    assert 300 < broken < 2900  # neither is every change harmless, nor does every one break the call at once


def test_frames_of_any_kind_in_any_order_only_break_the_call():
    chance = random.Random(6)
    for _ in range(2000):
        frames = [settings()] + [
            frame(
                chance.randrange(12), chance.randrange(256), chance.choice((0, 1, 1, 3, 2**32 - 1)),
                chance.randbytes(chance.choice((0, 3, 4, 6, 8, 8, 100, 16_384))),
            )
            for _ in range(20)
        ]  # fmt: skip
        hear(Call("/s/M"), b"".join(frames), chance)
