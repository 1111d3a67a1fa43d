"""SQLite as a backend: opening a file safely, its settings, its errors in our words.

Settings: write-ahead log, so that readers and one writer go on beside each other; `synchronous=normal`, so that what was stored
survives the end of the process (kill -9 too), while a power loss may cost the last seconds (since the last checkpoint) but never
leaves the file inconsistent. `sqlite:///file?synchronous=full` syncs each commit, for a price in speed, and survives that too.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from allocscope.storage.errors import (
    BadUrl,
    ForeignDatabase,
    NotADatabase,
    SchemaTooNew,
    StorageBroken,
    StorageBusy,
    StorageError,
    StorageFull,
    Unwritable,
)
from allocscope.storage.schema import HEAD, REVISIONS

MAGIC = b"SQLite format 3\0"
SYNCHRONOUS = ("normal", "full")
CHECKPOINT_PAGES = 4000
"""16 MiB of log before it is written back: half again as fast as SQLite's 1000 where samples of many allocators come in small batches."""
WRITES = "allocscope_writes"
"""Execution option of connections that will write: they take the write lock at once, and so wait for it instead of failing halfway."""


def open_engine(url: URL, *, busy_timeout_s: float) -> Engine:
    """An engine on a file whose schema is the newest; creates or upgrades it."""
    path, synchronous = _file(url)
    engine = _engine(url, busy_timeout_s, synchronous)
    try:
        if _revision(url, path, busy_timeout_s) != HEAD:
            _upgrade(engine)
        else:
            _try_writing(engine)
        _write_only_to(engine, path)
    except DBAPIError as error:
        engine.dispose()
        raise _cannot_open(url, path, error.orig) from error
    except StorageError:
        engine.dispose()
        raise
    return engine


def _file(url: URL) -> tuple[Path, str]:
    shown = url.render_as_string()
    if url.database in (None, "", ":memory:") or str(url.database).startswith("file:"):
        raise BadUrl(shown, "it names no file (write sqlite:///relative/path or sqlite:////absolute/path)")
    options = dict(url.query)
    synchronous = options.pop("synchronous", "normal")
    if options:
        raise BadUrl(shown, f"there is no option {', '.join(sorted(options))} (there is synchronous)")
    if synchronous not in SYNCHRONOUS:
        raise BadUrl(shown, f"synchronous is {synchronous!r} (normal or full)")
    return Path(str(url.database)), str(synchronous)


def _engine(url: URL, busy_timeout_s: float, synchronous: str) -> Engine:
    engine = create_engine(
        url.set(query={}),
        poolclass=QueuePool,
        pool_size=8,
        max_overflow=56,
        connect_args={"timeout": busy_timeout_s, "check_same_thread": False, "isolation_level": None},
    )

    @event.listens_for(engine, "connect")
    def _settings(connection: sqlite3.Connection, _record: object) -> None:
        for pragma in (
            "journal_mode = wal",
            f"synchronous = {synchronous}",
            f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
            f"journal_size_limit = {CHECKPOINT_PAGES * 4096}",
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # sqlite3 by itself begins late and deferred: then a reader that comes to write fails where another wrote meanwhile
        writes = connection.get_execution_options().get(WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _revision(url: URL, path: Path, busy_timeout_s: float) -> str | None:
    """The schema's revision, without changing a byte; None: the database is new."""
    shown = url.render_as_string()
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unwritable(shown, str(path), error.strerror or str(error)) from error
    if not start:
        return None
    if start != MAGIC:
        raise NotADatabase(shown, str(path))
    try:
        with closing(_read_only(path, busy_timeout_s)) as connection:
            return _revision_of(shown, connection)
    except sqlite3.Error as error:
        raise _cannot_open(url, path, error) from error


def _read_only(path: Path, busy_timeout_s: float) -> sqlite3.Connection:
    """Leaves no file behind, either: with nothing in a log there is nobody to share one with."""
    log = path.with_name(f"{path.name}-wal")
    alone = not log.exists() or log.stat().st_size == 0
    options = "immutable=1" if alone else "mode=ro"
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?{options}", uri=True, timeout=busy_timeout_s)


def _revision_of(shown: str, connection: sqlite3.Connection) -> str | None:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    tables = {name for name in tables if not name.startswith("sqlite_")}
    if not tables:
        return None
    if "alembic_version" not in tables or "samples" not in tables:
        raise ForeignDatabase(shown, sorted(tables))
    revision = next((str(r) for (r,) in connection.execute("SELECT version_num FROM alembic_version")), "none")
    if revision not in REVISIONS:
        raise SchemaTooNew(shown, revision, HEAD)
    return revision


def _upgrade(engine: Engine) -> None:
    from allocscope.storage.migrate import upgrade

    with writing(engine) as connection:
        upgrade(connection)  # reads the revision itself: somebody else may have been first


def _try_writing(engine: Engine) -> None:
    """Fail now rather than at the first batch."""
    with writing(engine) as connection:
        connection.execute(text("SELECT 1"))


def _write_only_to(engine: Engine, path: Path) -> None:
    """What goes to a file that was deleted or replaced meanwhile would be acknowledged, and gone at the next start."""
    opened = path.stat()

    @event.listens_for(engine, "begin", insert=True)
    def _check(connection: Connection) -> None:
        if connection.get_execution_options().get(WRITES, False) and not _is_still(path, opened):
            raise StorageBroken(
                f"{path} was deleted or replaced while it was open; restart to go on with what is there"
            )


def _is_still(path: Path, opened: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), opened)
    except OSError:
        return False


def _cannot_open(url: URL, path: Path, error: BaseException | None) -> StorageError:
    shown, code = url.render_as_string(), _code(error)
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return NotADatabase(shown, str(path))
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR):
        return Unwritable(shown, str(path), _why_unwritable(path) or str(error))
    return in_our_words(error)


def _why_unwritable(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return None


def _code(error: BaseException | None) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF  # without what SQLite adds for detail


def in_our_words(error: BaseException | None) -> StorageError:
    """The error of an open database."""
    code = _code(error)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StorageBusy(f"the database is busy: others held its lock for longer than the wait ({error}); try again")
    if code == sqlite3.SQLITE_FULL:
        return StorageFull(f"no room left for the database ({error}); free some, or prune")
    return StorageBroken(f"the database failed: {error}")


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that has the write lock from its beginning."""
    with engine.connect().execution_options(**{WRITES: True}) as connection, connection.begin():
        yield connection


@contextmanager
def translated() -> Iterator[None]:
    """Whatever the database says comes out in our words."""
    try:
        yield
    except DBAPIError as error:
        raise in_our_words(error.orig) from error
    except sqlite3.Error as error:
        raise in_our_words(error) from error
