"""Plain values out of a pickle: dicts, lists, tuples, strings, numbers. Whatever a hostile one asks for is never run.

The instructions of the pickle go through a screen before the unpickler sees them: only such as make plain values may occur,
and none that asks for memory out of proportion to its own size (a memo index of 2³² alone makes CPython's unpickler take
64 GiB), or for tuples deep inside one another (whose hash exhausts the stack). The screen lets the bytes through in pieces, so
that a large file never lies in memory whole, and can have every list handed to a hook as soon as it grows.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from allocscope.allocator.errors import CutOffError, HostilePickleError, NotASnapshotError, TooLargeError

MEMORY_LIMIT_BYTES = 3 << 29
"""How much the values of one file may take, by a rough count of its instructions."""
PIECE_BYTES = 1 << 20
PROTOCOL = b"\x80"
"""What every pickle since protocol 2 begins with."""
OnList = Callable[[list[Any]], int]
"""Called with a list that was added to; it may change it in place, and says how many values it took out of it."""
_TEXT_PICKLES = (b"(dp", b"(lp", b"(d.", b"(l.", b"}q", b"]q")
_LONGEST_STRING = 1 << 24
_LONGEST_NUMBER = 9
"""64 bits and the sign. Longer ones may all have one hash, and a dict of them takes forever."""
_TUPLES_IN_TUPLES = 8


def load_plain(
    data: bytes | Iterable[bytes],
    name: str,
    *,
    on_list: OnList | None = None,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
) -> Any:
    """The plain value that a pickle of protocol 2 to 5 holds; `name` is what errors call it.

    `on_list` is called with lists each time that a dict, as the last of up to 1,000 items, was added to them; it may change them
    in place, and empty the dicts that it took out. The unpickler itself keeps every dict to the end: one that occurs twice in the
    pickle is then empty from the second time on.

    Raises CutOffError, HostilePickleError, NotASnapshotError or TooLargeError.
    """
    chunks = iter(pieces(data) if isinstance(data, bytes) else data)
    first = _first(chunks)
    if not first:
        raise NotASnapshotError(name, "is empty")
    if not first.startswith(PROTOCOL):
        raise NotASnapshotError(name, _not_a_pickle(first))
    screen = _Screen(first, chunks, name, hooked=on_list is not None, limit=memory_limit_bytes)
    try:
        value = _PlainUnpickler(screen, on_list).load()
        for _ in chunks:  # the end of a compressed file tells whether it is whole
            pass
        return value
    except (HostilePickleError, CutOffError, TooLargeError, NotASnapshotError):
        raise
    except EOFError as error:
        raise CutOffError(name, "its pickle ends in the middle") from error
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to ask for
        raise NotASnapshotError(name, f"is a damaged pickle ({type(error).__name__}: {error})") from error


def pieces(data: bytes) -> Iterator[bytes]:
    """A file's bytes in pieces."""
    return (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))


def _first(chunks: Iterator[bytes]) -> bytes:
    return next((chunk for chunk in chunks if chunk), b"")


def _not_a_pickle(first: bytes) -> str:
    if first.startswith(_TEXT_PICKLES):
        return "is a pickle of protocol 0 or 1, which PyTorch never writes; dump it again with protocol 4"
    return "is not a pickle, nor JSON; of a log `allocscope oom` tells"


def _of_length(code: bytes, lengths: Iterable[int], *, width: int = 1) -> bytes:
    """An instruction whose argument begins with its length, for these lengths, the frequent ones first."""
    return b"|".join(re.escape(code + length.to_bytes(width, "little")) + b".{%d}" % length for length in lengths)


_SHORT = (3, 6, 5, *range(3), 4, *range(7, 64))


def _run(adding: bytes) -> re.Pattern[bytes]:
    """As many harmless instructions as there are in a row; `adding`: those among them that add to a list.

    No possessive repeat: CPython before 3.11.5 ends it in the wrong place where an alternative fails half way.
    """
    return re.compile(
        rb"(?:h.|K.K.\x86|K.|j....j....j....j....|[jJ]....|M..|[}\](012N)usld\x88\x89\x94]+|q.|r..[\x00-\x7f]\x00|\x80.|G.{8}|"
        + _of_length(b"\x8a", (6, 7, 5, 8, 4, 3, 9, 2, 1, 0))
        + b"|"
        + _of_length(b"\x8c", _SHORT)
        + b"|"
        + _of_length(b"X", _SHORT, width=4)
        + b"|"
        + adding
        + b")*",
        re.DOTALL,
    )


_WHOLE_RUN = _run(b"[ea]")
_HOOKED_RUN = _run(b"(?<!u)[ea]")
"""Where lists are hooked, what adds a dict to one needs a look: it comes after `u`, or after some argument that ends like it."""
_COUNTED = {b"\x8a": 1, b"\x8b": 4, b"U": 1, b"T": 4, b"C": 1, b"B": 4, b"\x8e": 8, b"\x8c": 1, b"X": 4, b"\x8d": 8}
"""Numbers, bytes and strings that begin with their length, and how many bytes that has."""
_FIXED = {
    b"h": 2, b"q": 2, b"K": 2, b"\x80": 2, b"M": 3, b"j": 5, b"J": 5, b"r": 5, b"G": 9, b"\x95": 9,
}  # fmt: skip
"""How long harmless instructions with an argument of fixed length are."""
_LONG_PUT, _FRAME, _STOP = b"r", b"\x95", b"."
_TUPLES = b"t\x85\x86\x87"
_ADDS = b"ea"
_HAND_OVER = b"Q"
"""The instruction that calls `persistent_load`; in a file it is refused, so it can only come from the screen."""
_LARGE_BYTES, _SMALL_BYTES = 64, 8
"""What an instruction's value takes at least, beyond its own bytes: an empty list, a place on the stack."""
_LARGE_OBJECTS = b"])}lt\x85\x86\x87"
_SMALL_OBJECTS = b"N2(\x94\x88\x89hKq0"
_HOSTILE = {
    b"R": "a call",
    b"b": "an object's state to be set",
    b"i": "an object to be made",
    b"o": "an object to be made",
    b"\x81": "an object to be made",
    b"\x92": "an object to be made",
    b"\x82": "a registered extension",
    b"\x83": "a registered extension",
    b"\x84": "a registered extension",
    b"P": "an object kept elsewhere",
    b"Q": "an object kept elsewhere",
    b"\x8f": "a set",
    b"\x90": "a set",
    b"\x91": "a set",
    b"\x96": "a bytearray",
    b"\x97": "a buffer",
    b"\x98": "a buffer",
}


class _Screen(io.RawIOBase):
    """The pickle as the unpickler may see it, piece by piece."""

    def __init__(self, first: bytes, chunks: Iterator[bytes], name: str, *, hooked: bool, limit: int) -> None:
        super().__init__()
        self._chunks, self.file_name, self._hooked = chunks, name, hooked
        self._run = (_HOOKED_RUN if hooked else _WHOLE_RUN).match
        self.memory_left = limit
        self._limit = limit
        self._next: bytes | None = first
        self._rest = b""
        """The beginning of an instruction whose end has not come yet."""
        self._passed = 0
        """How many bytes came before it."""
        self._stopped = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if self._stopped:
                return 0
            self._ready = memoryview(self._screened())
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _screened(self) -> bytes:
        chunk = self._next if self._next is not None else next(self._chunks, None)
        self._next = None
        if chunk is None:
            raise CutOffError(self.file_name, "its pickle ends in the middle")
        self._count(chunk)
        data = self._rest + chunk
        out: list[bytes] = []
        copied = at = 0
        while (at := self._harmless(data, at)) < len(data):
            code = data[at : at + 1]
            if code == _STOP:
                self._stopped = True
                at += 1
                break
            length = self._length(data, at, code)
            if at + length > len(data):
                break
            if code == _FRAME:
                out.append(data[copied:at])
                copied = at + length
            elif code in _TUPLES or (code in _ADDS and self._hooked):
                out += (data[copied : at + 1], _HAND_OVER)
                copied = at + 1
            elif code == _LONG_PUT and int.from_bytes(data[at + 1 : at + 5], "little") > self._passed + at:
                raise HostilePickleError(self.file_name, "memory out of proportion")
            at += length
        out.append(data[copied:at])
        self._rest = data[at:]
        self._passed += at
        return b"".join(out)

    def _harmless(self, data: bytes, at: int) -> int:
        """Where the harmless instructions from `at` on end."""
        run = self._run(data, at)
        return run.end() if run else at

    def _length(self, data: bytes, at: int, code: bytes) -> int:
        """Of an instruction and its argument, as far as is there."""
        if (width := _COUNTED.get(code)) is not None:
            start = at + 1 + width
            if start > len(data):
                return start - at
            count = int.from_bytes(data[at + 1 : start], "little")
            if code in b"\x8a\x8b" and count > _LONGEST_NUMBER:
                raise HostilePickleError(self.file_name, f"a number of {count} bytes")
            if count > _LONGEST_STRING:
                raise HostilePickleError(self.file_name, f"one value of {count} bytes")
            return start + count - at
        if code in _FIXED:
            return _FIXED[code]
        if code in _ADDS or code in _TUPLES:
            return 1
        raise _refusal(data, at, self._passed + at, self.file_name)

    def _count(self, chunk: bytes) -> None:
        large = len(chunk) - len(chunk.translate(None, _LARGE_OBJECTS))
        small = len(chunk) - len(chunk.translate(None, _SMALL_OBJECTS))
        self.memory_left -= _LARGE_BYTES * large + _SMALL_BYTES * small + len(chunk)
        if self.memory_left < 0:
            raise TooLargeError(self.file_name, self._limit)


def _refusal(data: bytes, at: int, position: int, name: str) -> Exception:
    code = data[at : at + 1]
    if code in b"c\x93":
        return HostilePickleError(name, f"{_wanted(data, at)} to be imported")
    if code in _HOSTILE:
        return HostilePickleError(name, _HOSTILE[code])
    return NotASnapshotError(name, f"is a damaged pickle (byte {position} is {code!r})")


def _wanted(data: bytes, at: int) -> str:
    """The name of what is to be imported, as near as it can be told."""
    if data[at : at + 1] == b"c":
        words = data[at + 1 : at + 400].split(b"\n")[:2]
    else:
        words = re.findall(rb"\x8c.([\w.]+)", data[max(at - 400, 0) : at], re.DOTALL)[-2:]
    return ".".join(word.decode("ascii", "replace") for word in words) or "something"


class _PlainUnpickler(pickle.Unpickler):
    """Looks nothing up, whatever the screen may have let through; what the screen hands over goes to the hook."""

    def __init__(self, screen: _Screen, on_list: OnList | None) -> None:
        super().__init__(io.BufferedReader(screen, 1 << 17))
        self._screen, self._name, self._on_list = screen, screen.file_name, on_list

    def find_class(self, module: str, name: str) -> NoReturn:
        raise HostilePickleError(self._name, f"{module}.{name} to be imported")

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is list:
            if pid and self._on_list is not None:
                self._screen.memory_left += _LARGE_BYTES * self._on_list(pid)
        elif type(pid) is tuple and _depth(pid, 0) > _TUPLES_IN_TUPLES:
            raise HostilePickleError(self._name, "tuples deep inside one another")
        return pid


def _depth(value: tuple[Any, ...], above: int) -> int:
    if above > _TUPLES_IN_TUPLES:
        return above
    return max((_depth(item, above + 1) for item in value if type(item) is tuple), default=above)
