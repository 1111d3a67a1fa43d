"""Plain values out of a pickle: dicts, lists, tuples, strings, numbers. Whatever a hostile one asks for is never run.

The instructions of the pickle are read first, without obeying them: only such as make plain values may occur, and none that
asks for memory out of proportion to its own size (a memo index of 2³² alone makes CPython's unpickler take 64 GiB).
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any, NoReturn

from allocscope.allocator.errors import CutOffError, HostilePickleError, NotASnapshotError

_RUN = re.compile(
    rb"(?:[(.012N}\])aesutdl\x85-\x89\x8f-\x91\x94]"  # no argument
    rb"|[hqK\x80].|M..|[Jj]....|[G\x95].{8}"  # of fixed length
    rb"|\x8a(?:\x00|\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}|\x09.{9}))+",
    re.DOTALL,
)
"""As many harmless instructions as there are in a row."""
_COUNTED = {b"\x8a": 1, b"\x8b": 4, b"U": 1, b"T": 4, b"C": 1, b"B": 4, b"\x8e": 8, b"\x8c": 1, b"X": 4, b"\x8d": 8}
"""Numbers, bytes and strings that begin with their length, and how many bytes that has."""
_LONG_PUT = b"r"
_PROTOCOL = b"\x80"
"""What every pickle since protocol 2 begins with."""
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
    b"\x96": "a bytearray",
    b"\x97": "a buffer",
    b"\x98": "a buffer",
}


def load_plain(data: bytes, name: str) -> Any:
    """The plain value that a pickle of protocol 2 or later holds; `name` is what errors call it."""
    if not data:
        raise NotASnapshotError(name, "is empty")
    if not data.startswith(_PROTOCOL):
        raise NotASnapshotError(name, "is not a pickle")
    _check(data, name)
    try:
        return _PlainUnpickler(data, name).load()
    except HostilePickleError:
        raise
    except EOFError as error:
        raise CutOffError(name, "its pickle ends in the middle") from error
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to ask for
        raise NotASnapshotError(name, f"is a damaged pickle ({type(error).__name__}: {error})") from error


def _check(data: bytes, name: str) -> None:
    at, end = 0, len(data)
    while at < end:
        if (run := _RUN.match(data, at)) is not None:
            at = run.end()
            if at == end:
                break
        code = data[at : at + 1]
        if (width := _COUNTED.get(code)) is not None:
            start = at + 1 + width
            at = start + int.from_bytes(data[at + 1 : start], "little")
        elif code == _LONG_PUT:
            if int.from_bytes(data[at + 1 : at + 5], "little") > at:
                raise HostilePickleError(name, "memory out of proportion")
            at += 5
        elif _is_cut(data, at):
            break
        else:
            raise _refusal(data, at, name)
    if at > end or data[-1:] != b".":
        raise CutOffError(name, "its pickle ends in the middle")


def _is_cut(data: bytes, at: int) -> bool:
    """Whether a harmless instruction's argument is missing."""
    return len(data) - at < 10 and data[at : at + 1] in b"hqK\x80MJjG\x95"


def _refusal(data: bytes, at: int, name: str) -> Exception:
    code = data[at : at + 1]
    if code in b"c\x93":
        return HostilePickleError(name, f"{_wanted(data, at)} to be imported")
    if code in _HOSTILE:
        return HostilePickleError(name, _HOSTILE[code])
    return NotASnapshotError(name, f"is a damaged pickle (byte {at} is {code!r})")


def _wanted(data: bytes, at: int) -> str:
    """The name of what is to be imported, as near as it can be told."""
    if data[at : at + 1] == b"c":
        words = data[at + 1 : at + 400].split(b"\n")[:2]
    else:
        words = re.findall(rb"\x8c.([\w.]+)", data[max(at - 400, 0) : at], re.DOTALL)[-2:]
    return ".".join(word.decode("ascii", "replace") for word in words) or "something"


class _PlainUnpickler(pickle.Unpickler):
    """Looks nothing up, whatever `_check` may have let through."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(io.BytesIO(data))
        self._name = name

    def find_class(self, module: str, name: str) -> NoReturn:
        raise HostilePickleError(self._name, f"{module}.{name} to be imported")

    def persistent_load(self, pid: object) -> NoReturn:
        raise HostilePickleError(self._name, "an object kept elsewhere")
