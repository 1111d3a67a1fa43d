"""SQLite files: opened safely, migrated, kept through kill -9."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, event, make_url

from allocscope.model import COLUMNS
from allocscope.storage import migrate, schema, sqlite
from allocscope.storage.repository import (
    BadUrl,
    CannotOpen,
    ForeignDatabase,
    NotADatabase,
    SchemaTooNew,
    StorageBroken,
    StorageBusy,
    StorageError,
    StorageFull,
    Unwritable,
)
from allocscope.storage.sql import SqlRepository, open_repository
from tests.storage.made import MAP, OOM, batch, chunk, full_chunk, reading, ref
from tests.storage.test_captures import arrival, bring, content, id_of


@pytest.fixture
def path(tmp_path):
    return tmp_path / "allocscope.db"


def open_at(path, **more):
    return open_repository(f"sqlite:///{path}", **more)


def make(path, *batches):
    """A database with these batches, closed."""
    repository = open_at(path)
    repository.store(list(batches))
    repository.close()


def folder_of(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.parent.iterdir() if p.is_file()}


def run_sql(path, *statements):
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


class TestOpening:
    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("sqlite://", "names no file"),
            ("sqlite:///:memory:", "names no file"),
            ("sqlite:///file:x?uri=true", "names no file"),
            ("sqlite:///x.db?synchronous=off", "synchronous is 'off'"),
            ("sqlite:///x.db?colour=red", "no option colour"),
            ("mysql://user:secret@host/db", "no backend 'mysql'"),
            ("user:secret@nothing", "not a URL"),
        ],
    )
    def test_a_url_that_cannot_be_says_why_and_no_password(self, url, says):
        with pytest.raises(BadUrl, match=says) as raised:
            open_repository(url)
        assert "secret" not in str(raised.value)

    @pytest.mark.parametrize(
        "content",
        [
            pytest.param(b"job,bytes\ntrain,5\n", id="text"),
            pytest.param(b"x", id="one byte"),
            pytest.param(b"SQLite format 3\0" + b"\xff" * 4_000, id="garbage after the heading"),
            pytest.param(b"SQLite format 3\0", id="cut off"),
        ],
    )
    def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(self, path, content):
        path.write_bytes(content)
        with pytest.raises(NotADatabase, match=r"allocscope\.db is not an SQLite database, or is damaged"):
            open_at(path)
        assert folder_of(path) == {"allocscope.db": content}

    def test_somebody_elses_database_is_refused_and_left_as_it_is(self, path):
        run_sql(path, "CREATE TABLE songs (title TEXT)")
        before = folder_of(path)
        with pytest.raises(ForeignDatabase, match=r"not Allocscope's \(songs\)"):
            open_at(path)
        assert folder_of(path) == before

    def test_a_newer_schema_is_refused_and_left_as_it_is(self, path):
        make(path, batch(1, chunk(1)))
        run_sql(path, "UPDATE alembic_version SET version_num = '9999'", "CREATE TABLE from_the_future (x)")
        before = folder_of(path)
        with pytest.raises(SchemaTooNew, match="revision '9999', this Allocscope knows up to") as raised:
            open_at(path)
        assert (raised.value.revision, raised.value.newest_known) == ("9999", schema.HEAD)
        assert folder_of(path) == before

    def test_a_newer_schema_in_a_log_that_is_not_yet_written_back_is_seen(self, path):
        make(path)
        with closing(sqlite3.connect(path)) as newer:  # still open, so what it writes stays in the log
            newer.execute("PRAGMA wal_autocheckpoint = 0")
            with newer:
                newer.execute("UPDATE alembic_version SET version_num = '9999'")
            with pytest.raises(SchemaTooNew):
                open_at(path)

    @pytest.mark.parametrize(
        ("where", "says"),
        [
            ("no/such/folder/x.db", "there is no folder"),
            (".", "Is a directory"),
            ("file/x.db", "Not a directory"),
        ],
    )
    def test_a_place_that_cannot_be_written_says_why(self, tmp_path, where, says):
        (tmp_path / "file").write_text("")
        with pytest.raises(Unwritable, match=says):
            open_at(tmp_path / where)

    def test_a_file_system_that_takes_no_files_says_so(self):
        with pytest.raises(Unwritable, match="unable to open database file"):
            open_repository("sqlite:////proc/allocscope.db")

    def test_an_empty_file_becomes_a_database(self, path):
        path.touch()
        assert open_at(path).counts().samples == 0

    def test_a_name_with_odd_characters(self, tmp_path):
        make(tmp_path / "50% été #1.db", batch(1, chunk(1)))
        repository = open_at(tmp_path / "50% été #1.db")
        assert repository.counts().samples == 1
        repository.close()
        assert [p.name for p in tmp_path.iterdir()] == ["50% été #1.db"]

    def test_a_current_database_is_opened_without_alembic(self, path):
        make(path)
        code = (
            "import sys; from allocscope.storage.sql import open_repository;"
            f"open_repository({f'sqlite:///{path}'!r}).counts(); sys.exit('alembic' in sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    def test_several_processes_may_open_a_new_one_at_once(self, path):
        code = (
            "import sys; sys.stdin.readline()\n"
            "from allocscope.storage.sql import open_repository\n"
            "from tests.storage.made import batch, chunk\n"
            "name = sys.argv[2]\n"
            "r = open_repository(sys.argv[1], busy_timeout_s=60)\n"
            "r.store([batch(1, chunk(1, process_id=name), daemon_id=name)]); r.close()"
        )
        command = [sys.executable, "-W", "error", "-c", code, f"sqlite:///{path}"]
        started = [subprocess.Popen([*command, f"p{n}"], stdin=subprocess.PIPE) for n in range(3)]
        for process in started:
            process.communicate(b"go\n", timeout=60)
        assert [process.returncode for process in started] == [0, 0, 0]
        assert open_at(path).counts().samples == 3


class TestMigrations:
    def test_the_revisions_that_the_code_knows_are_those_there_are(self):
        script = ScriptDirectory.from_config(migrate.alembic_config())
        assert [r.revision for r in script.walk_revisions()][::-1] == list(schema.REVISIONS)
        assert script.get_heads() == [schema.HEAD]

    def test_every_counter_of_a_sample_has_its_column(self):
        assert [c.name for c in schema.samples.c][4:] == list(COLUMNS)

    @pytest.mark.parametrize("first", [None, *schema.REVISIONS])
    def test_lead_to_what_the_code_expects(self, path, tmp_path, first):
        """From nothing and from every revision: the same tables, indexes and constraints, word for word."""
        if first is not None:
            engine = create_engine(f"sqlite:///{path}")
            with engine.begin() as connection:
                migrate.upgrade(connection, first)
            engine.dispose()
        make(path)
        expected = tmp_path / "expected.db"
        engine = create_engine(f"sqlite:///{expected}")
        schema.metadata.create_all(engine)
        engine.dispose()
        assert sorted(definitions(path)) == sorted(definitions(expected))
        engine = create_engine(f"sqlite:///{path}")
        with engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
        engine.dispose()

    NEXT = """
import sqlalchemy as sa
from alembic import op
revision, down_revision = "0004", "0003"
def upgrade():
    op.add_column("jobs", sa.Column("team", sa.Text()))
    op.create_table("teams", sa.Column("team", sa.Text()))
"""

    @pytest.fixture
    def with_next(self, tmp_path, monkeypatch):
        """A later Allocscope, whose revision 0004 is this text."""

        def write(text):
            folder = tmp_path / "migrations"
            shutil.copytree(migrate.MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
            (folder / "versions" / "r0004_next.py").write_text(text)
            monkeypatch.setattr(migrate, "MIGRATIONS", folder)
            monkeypatch.setattr(sqlite, "HEAD", "0004")
            monkeypatch.setattr(sqlite, "REVISIONS", (*schema.REVISIONS, "0004"))

        return write

    def test_an_older_database_is_upgraded_with_all_it_holds(self, path, with_next):
        make(path, batch(1, chunk(1, 2)))
        with_next(self.NEXT)
        repository = open_at(path)
        assert repository.counts().samples == 2
        repository.close()
        assert "teams" in " ".join(definitions(path))

    def test_an_upgrade_that_fails_leaves_the_older_one_as_it_was(self, path, with_next):
        make(path, batch(1, chunk(1, 2)))
        before = definitions(path)
        with_next(self.NEXT + '    op.execute("INSERT INTO nothing_of_that_name VALUES (1)")\n')
        with pytest.raises(StorageBroken, match="nothing_of_that_name"):
            open_at(path)
        assert definitions(path) == before
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("0003",)]
            assert connection.execute("SELECT count(*) FROM samples").fetchall() == [(2,)]


def definitions(path) -> list[str]:
    """What was created, word for word, but for blanks, the quotes that SQLite puts to a table's new name, and Alembic's own table."""
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'alembic%' AND name NOT LIKE 'sqlite_%'"
        created = [" ".join(sql.split()) for (sql,) in connection.execute(query)]
        return [re.sub(r'^CREATE TABLE "(\w+)"', r"CREATE TABLE \1", sql) for sql in created]


def test_people_can_read_the_tables(path):
    """Words as words, sums beside what they sum up, what is not exact by name."""
    make(path, batch(1, block_maps=((ref(), MAP),), events=(OOM,), readings=(reading(free=40),)))

    def rows(query):
        with closing(sqlite3.connect(path)) as connection:
            return connection.execute(query).fetchall()

    sums = "reserved_bytes, allocated_bytes, requested_bytes, stranded_bytes, private_bytes, largest_free_block_bytes"
    assert rows(f"SELECT {sums} FROM block_maps") == [(107, 67, None, 10, 10, 16)]
    assert rows("SELECT json_extract(groups, '$[0].pool', '$[1].live[0].bytes') FROM block_maps") == [('["large",7]',)]
    assert rows("SELECT process_id, kind, requested_bytes FROM events") == [("p1", "oom", 2 << 30)]
    lines = "process_id, requested_bytes, stranded_bytes, driver_bytes, free_bytes, inexact"
    assert rows(f"SELECT {lines} FROM bills JOIN allocators USING (allocator_id) ORDER BY process_id") == [
        ("", None, None, 0, 40, ""),
        ("p1", 50, 10, None, None, "stranded"),
    ]
    assert rows("SELECT uuid, node, model, free_bytes, json_extract(bill, '$.total_bytes') FROM devices") == [
        ("GPU-5d9d0fd3-0000", "n1", "NVIDIA H200", 40, 100)
    ]


class TestTrouble:
    @pytest.fixture
    def held(self, path):
        """A database whose write lock somebody else has, and a way to let go of it."""
        make(path)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield lambda: other.execute("ROLLBACK")

    def test_a_lock_held_for_longer_than_the_wait(self, path, held):
        with pytest.raises(StorageBusy, match="others held its lock for longer than the wait"):
            open_at(path, busy_timeout_s=0.05)
        held()
        assert open_at(path, busy_timeout_s=0.05).store([batch(1, chunk(1))]).samples == 1

    def test_a_lock_taken_later_costs_a_batch_nothing_but_another_try(self, path):
        repository = open_at(path, busy_timeout_s=0.05)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StorageBusy):
                repository.store([batch(1, chunk(1))])
            assert repository.counts().samples == 0, "who reads need not wait"
        assert repository.store([batch(1, chunk(1))]).samples == 1

    def test_a_full_disk_costs_a_batch_nothing_but_another_try(self, path):
        engine = sqlite.open_engine(make_url(f"sqlite:///{path}"), busy_timeout_s=1)
        repository = SqlRepository(engine)
        engine.dispose()
        limit = ["PRAGMA max_page_count = 60"]

        @event.listens_for(engine, "checkout")
        def _limit(connection, *_):
            connection.execute(limit[0])

        repository.store([batch(1, chunk(1))])
        with pytest.raises(StorageFull, match="no room left"):
            repository.store([batch(2, full_chunk(1, 2_000, "p2"))])
        assert repository.counts().samples == 1
        assert repository.acknowledged("n1", "d1") == 1
        limit[0] = "PRAGMA max_page_count = 1000000"
        assert repository.store([batch(2, full_chunk(1, 2_000, "p2"))]).samples == 2_000

    @pytest.mark.parametrize("replaced", [pytest.param(False, id="deleted"), pytest.param(True, id="replaced")])
    def test_a_file_that_goes_while_it_is_open_takes_no_more(self, path, replaced):
        """What were stored in it would be acknowledged, and gone at the next start."""
        repository = open_at(path)
        repository.store([batch(1, chunk(1))])
        path.unlink()
        if replaced:
            path.write_bytes(b"something else")
        with pytest.raises(StorageBroken, match=r"allocscope\.db was deleted or replaced while it was open"):
            repository.store([batch(2, chunk(2))])
        with pytest.raises(StorageBroken):
            repository.store([batch(2, chunk(2))])
        assert repository.counts().samples == 1

    def test_every_error_is_of_one_tree(self):
        kinds = [BadUrl, ForeignDatabase, NotADatabase, SchemaTooNew, Unwritable]
        assert all(issubclass(kind, CannotOpen) for kind in kinds)
        assert all(issubclass(kind, StorageError) for kind in [CannotOpen, StorageBroken, StorageBusy, StorageFull])


class TestDurability:
    @pytest.mark.parametrize(("options", "level"), [("", 1), ("?synchronous=normal", 1), ("?synchronous=full", 2)])
    def test_settings_are_those_that_the_url_says(self, path, options, level):
        engine = sqlite.open_engine(make_url(f"sqlite:///{path}{options}"), busy_timeout_s=1)
        with engine.connect() as connection:
            asked = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
        engine.dispose()
        assert asked == ["wal", level]

    WRITER = """
import sys
from itertools import count
from allocscope.storage.sql import open_repository
from tests.storage.made import batch, full_chunk
repository = open_repository(sys.argv[1])
for k in count(1):
    repository.store([batch(k, full_chunk(500 * (k - 1) + 1, 500, "p1"), full_chunk(500 * (k - 1) + 1, 500, "p2"))])
    print(k, flush=True)
"""

    def test_kill_9_in_the_middle_of_storing_leaves_whole_batches_and_all_that_were_acknowledged(self, path):
        acknowledged = 0
        for _ in range(2):  # the second time over what the first one left
            writer = subprocess.Popen(
                [sys.executable, "-c", self.WRITER, f"sqlite:///{path}"], stdout=subprocess.PIPE, text=True
            )
            assert writer.stdout
            with writer:
                for _ in range(5):
                    acknowledged = int(writer.stdout.readline())
                writer.kill()  # in the middle of the next one
                acknowledged = max(acknowledged, *map(int, writer.stdout.read().split()), 0)
            repository = open_at(path)
            stored = repository.acknowledged("n1", "d1")
            assert stored >= acknowledged
            for process_id in ("p1", "p2"):
                kept = repository.samples(ref(process_id), limit=10**6)
                assert [n for c in kept for n in c.sequence] == list(range(1, 500 * stored + 1))
            repository.close()


def number_in(path, query: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(query).fetchone()[0])


def pieces_in(path) -> int:
    assert number_in(path, "SELECT count(*) FROM capture_uploads") == 0
    return number_in(path, "SELECT count(*) FROM capture_pieces")


def add_many(repository, upload: int, count: int) -> None:
    for number in range(count):
        repository.captures.add(upload, number, b"x" * 20_000, received_us=1)


class TestCaptures:
    def test_what_is_dropped_or_discarded_gives_its_room_back(self, path):
        """The file does not grow for ever: what goes makes room for what comes."""
        repository = open_at(path)
        many = [b"x" * 20_000] * 30
        for number in range(1, 4):
            bring(repository, number, *many, limit_bytes=700_000)
        assert pieces_in(path) == 30
        pages = number_in(path, "PRAGMA page_count")
        for number in range(4, 8):
            bring(repository, number, *many, limit_bytes=700_000)
        bring(repository, 7, *many)  # it is there
        assert repository.captures.prune(before_us=10**9, limit_bytes=0, abandoned_before_us=0).for_age == 1
        assert pieces_in(path) == 0
        assert number_in(path, "PRAGMA page_count") <= 1.1 * pages

    UPLOADER = """
import sys
from itertools import count
from allocscope.storage.sql import open_repository
from tests.storage.test_captures import arrival, id_of
captures = open_repository(sys.argv[1]).captures
for k in count(int(sys.argv[2])):
    upload = captures.begin(id_of(k), received_us=k)
    for n in range(20):
        captures.add(upload, n, b"%d" % k * 10_000, received_us=k)
    captures.keep(arrival(k, upload=upload, piece_count=20, stored_bytes=20 * len(b"%d" % k * 10_000)), limit_bytes=2**40)
    print(k, flush=True)
"""

    def test_kill_9_in_the_middle_of_an_upload_leaves_whole_captures_and_nothing_for_long(self, path):
        kept = 0
        for _ in range(2):
            command = [sys.executable, "-c", self.UPLOADER, f"sqlite:///{path}", str(kept + 1)]
            uploader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert uploader.stdout
            with uploader:
                for _ in range(5):
                    kept = int(uploader.stdout.readline())
                uploader.kill()  # in the middle of the next one
                kept = max(kept, *map(int, uploader.stdout.read().split()), 0)
            repository = open_at(path)
            found = repository.captures.totals().captures
            assert found >= kept
            for number in range(1, found + 1):
                assert content(repository, number) == [b"%d" % number * 10_000] * 20
            repository.captures.prune(before_us=0, limit_bytes=2**40, abandoned_before_us=10**9)
            assert pieces_in(path) == 20 * found
            kept = found
            repository.close()

    def test_a_full_disk_costs_an_upload_nothing_but_another_try(self, path):
        engine = sqlite.open_engine(make_url(f"sqlite:///{path}"), busy_timeout_s=1)
        repository = SqlRepository(engine)
        engine.dispose()
        limit = ["PRAGMA max_page_count = 200"]

        @event.listens_for(engine, "checkout")
        def _limit(connection, *_):
            connection.execute(limit[0])

        upload = repository.captures.begin(id_of(1), received_us=1)
        with pytest.raises(StorageFull, match="no room left"):
            add_many(repository, upload, 100)
        repository.captures.discard(upload)
        assert pieces_in(path) == 0
        assert repository.captures.find(id_of(1)) is None
        assert repository.store([batch(1, chunk(1))]).samples == 1, "what else comes finds room"
        limit[0] = "PRAGMA max_page_count = 1000000"
        assert bring(repository, 1, *[b"x" * 20_000] * 100).is_new

    def test_whoever_writes_beside_an_upload_waits_for_a_piece_at_most(self, path):
        repository, other = open_at(path), open_at(path, busy_timeout_s=0.5)
        upload = repository.captures.begin(id_of(1), received_us=1)
        for number in range(20):
            repository.captures.add(upload, number, bytes(1 << 20), received_us=1)
            assert other.store([batch(number + 1, chunk(number + 1))]).samples == 1
        came = arrival(1, upload=upload, piece_count=20, stored_bytes=20 << 20)
        assert repository.captures.keep(came, limit_bytes=2**40).is_new

    def test_a_database_from_before_captures_is_upgraded_with_all_it_holds(self, path):
        engine = create_engine(f"sqlite:///{path}")
        with engine.begin() as connection:
            migrate.upgrade(connection, "0001")
        engine.dispose()
        run_sql(path, "INSERT INTO jobs (job, first_received_us) VALUES ('train', 1)")
        repository = open_at(path)
        assert repository.counts().jobs == 1
        assert bring(repository, 1).is_new
