# ruff: noqa: N818  (an error is named for what is wrong)
"""What can go wrong with storage.

StorageError
├── CannotOpen           the storage at a URL is not to be had; nothing was changed
│   ├── BadUrl           no backend has such a URL, or such an option
│   ├── NotADatabase     the file is something else
│   ├── ForeignDatabase  a database, but somebody else's
│   ├── Unwritable       the folder or file cannot be written
│   └── SchemaTooNew     written by a newer Allocscope
├── StorageBusy          others held the lock longer than the wait; nothing was stored, try again
├── StorageFull          no room left on the disk; nothing was stored, try again when there is
├── StorageBroken        the database failed otherwise; nothing was stored
├── Unstorable           what was given cannot be kept; trying again will not help
├── NodeNameTaken        another daemon goes by this node name
├── TooManyOrders        as many captures are on order as may be
├── OrderedLately        a capture of that allocator was ordered a moment ago
├── UploadLost           pieces of a capture are not there any more; it must be sent again
├── UnknownMetric        there is no series of that name
└── BadCursor            a cursor that this storage did not give
"""

from __future__ import annotations

from collections.abc import Sequence


class StorageError(Exception):
    """The root of the tree."""


class CannotOpen(StorageError):
    """The storage at `url` is not to be had; nothing was changed."""

    def __init__(self, url: str, text: str) -> None:
        super().__init__(f"cannot open {url}: {text}")
        self.url = url


class BadUrl(CannotOpen):
    """No backend has such a URL, or such an option."""


class NotADatabase(CannotOpen):
    """The file is something else."""

    def __init__(self, url: str, path: str) -> None:
        super().__init__(
            url, f"{path} is not an SQLite database, or is damaged (name another file, or restore it from a backup)"
        )
        self.path = path


class ForeignDatabase(CannotOpen):
    """A database, but somebody else's."""

    def __init__(self, url: str, tables: Sequence[str]) -> None:
        super().__init__(
            url, f"it holds tables that are not Allocscope's ({', '.join(tables[:5])}); name a database of its own"
        )
        self.tables = tuple(tables)


class Unwritable(CannotOpen):
    """The folder or file cannot be written."""

    def __init__(self, url: str, path: str, why: str) -> None:
        super().__init__(url, f"{path}: {why} (it must be a folder and file that this user may write)")
        self.path = path


class SchemaTooNew(CannotOpen):
    """Written by a newer Allocscope; it was not touched."""

    def __init__(self, url: str, revision: str, newest_known: str) -> None:
        super().__init__(
            url,
            f"its schema is of revision {revision!r}, this Allocscope knows up to {newest_known!r}: "
            "a newer one wrote it (upgrade this Allocscope, or name another database)",
        )
        self.revision, self.newest_known = revision, newest_known


class StorageBusy(StorageError):
    """Others held the lock longer than the wait; nothing was stored, try again."""


class StorageFull(StorageError):
    """No room left on the disk; nothing was stored, try again when there is."""


class StorageBroken(StorageError):
    """The database failed otherwise; nothing was stored."""


class Unstorable(StorageError):
    """What was given cannot be kept (a figure beyond 2^63-1, columns of several lengths); trying again will not help."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"cannot be kept, so nothing of the call was stored: {why} (leave it out, and store the rest again)"
        )
        self.why = why


class NodeNameTaken(StorageError):
    """Another daemon goes by this node name."""

    def __init__(self, node: str, holder: str, asker: str, last_received_us: int) -> None:
        super().__init__(
            f"node {node!r} is reported by daemon {holder} (heard at {last_received_us} µs), so daemon {asker} may not: "
            "give one of them another node name, or stop one and wait until it counts as silent"
        )
        self.node, self.holder, self.asker, self.last_received_us = node, holder, asker, last_received_us


class TooManyOrders(StorageError):
    """As many captures are on order as may be; none of the call was ordered."""

    def __init__(self, whose: str, found: int, most: int) -> None:
        super().__init__(
            f"{found} captures of {whose} would be on order, and at most {most} may be: wait until some have come, or order fewer"
        )
        self.whose, self.found, self.most = whose, found, most


class OrderedLately(StorageError):
    """A capture of that allocator was ordered a moment ago."""

    def __init__(self, capture_id: str) -> None:
        super().__init__(f"a capture of this allocator was ordered a moment ago: {capture_id} (see what came of it)")
        self.capture_id = capture_id


class UploadLost(StorageError):
    """Pieces of a capture are not there any more; it must be sent again."""

    def __init__(self, upload: int) -> None:
        super().__init__(f"pieces of upload {upload} are gone, as if it had been abandoned: send the capture again")
        self.upload = upload


class UnknownMetric(StorageError):
    """There is no series of that name."""

    def __init__(self, metric: str, known: Sequence[str]) -> None:
        super().__init__(f"there is no series {metric!r}; there are {', '.join(known)}")
        self.metric, self.known = metric, tuple(known)


class BadCursor(StorageError):
    """A cursor that this storage did not give."""

    def __init__(self, cursor: str) -> None:
        super().__init__(
            f"no such cursor: {cursor[:40]!r} (pass on a page's next_cursor as it is, or none for the first page)"
        )
        self.cursor = cursor
