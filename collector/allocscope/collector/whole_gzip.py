"""Whether what comes in pieces is one whole gzip stream of bounded size. Nothing of it is kept, or looked into."""

from __future__ import annotations

import zlib

LOOKED_AT_ONCE = 1 << 20
"""Bytes of the contents that lie in memory at a time, however well they were compressed."""


class NotWhole(ValueError):  # noqa: N818  (an error is named for what is wrong)
    """It is not one whole gzip stream; the text says what is wrong."""


class TooLarge(NotWhole):
    """It unpacks to more than is allowed."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"it unpacks to more than {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


class WholeGzip:
    """Is shown a stream, piece by piece."""

    def __init__(self, limit_bytes: int) -> None:
        self._member = zlib.decompressobj(wbits=31)
        self._limit_bytes = limit_bytes
        self.unpacked_bytes = 0
        """So far."""

    def see(self, piece: bytes) -> None:
        """The next piece. NotWhole: it is none of one gzip stream; TooLarge."""
        is_more = bool(piece)
        while is_more:
            if self._member.eof:
                raise NotWhole("something follows the end of its gzip stream")
            try:
                found_bytes = len(self._member.decompress(piece, LOOKED_AT_ONCE))
            except zlib.error as error:
                raise NotWhole(f"it is damaged gzip ({error})") from error
            self.unpacked_bytes += found_bytes
            if self.unpacked_bytes > self._limit_bytes:
                raise TooLarge(self._limit_bytes)
            piece = self._member.unconsumed_tail or self._member.unused_data
            is_more = bool(piece) or (found_bytes == LOOKED_AT_ONCE and not self._member.eof)

    def end(self) -> int:
        """There is no more; how many bytes it unpacks to. NotWhole: it ends in the middle."""
        if not self._member.eof:
            raise NotWhole("its gzip stream ends in the middle")
        return self.unpacked_bytes
