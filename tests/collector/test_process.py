"""Starting and ending the real thing, and what it says where it cannot start."""

import json
import os
import signal
import sqlite3
import subprocess
import sys

import pytest

from allocscope.cli.collector import main
from allocscope.collector.config import default_database
from allocscope.model import Event, EventKind, wire
from allocscope.storage.errors import StorageBusy
from allocscope.storage.sql import open_repository
from tests.collector.harness import CollectorProcess, batch, sample, stream

STARTS = """
import contextlib, io, json, os, sys
from allocscope.cli.app import main
said = []
for flags, environ in json.load(sys.stdin):
    os.environ.update(environ)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        said.append([main(["collector", *flags]), stderr.getvalue()])
    for name in environ:
        del os.environ[name]
json.dump(said, sys.stdout)
"""
"""Many starts that come to nothing, in one process: importing takes longer than all of them."""


@pytest.fixture(scope="module")
def starts(running, tmp_path_factory):
    """By name: the status of a start, and what was said."""
    folder = tmp_path_factory.mktemp("starts")
    database, listen = f"--database=sqlite:///{folder}/c.db", ("--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0")
    newer = folder / "newer.db"
    open_repository(f"sqlite:///{newer}").close()
    connection = sqlite3.connect(newer)
    with connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    config = folder / "collector.toml"
    config.write_text(
        'databse = "sqlite:///x.db"\nretire_after_s = 1\nqueue_bytes = "much"\nwebhook = ["ftp://hooks.example/secret"]\n'
    )
    before = newer.read_bytes()
    cases = {
        "gRPC taken": ([database, f"--grpc-listen={running.grpc}", listen[1]], {}),
        "HTTP taken": ([database, f"--http-listen={running.http}", listen[0]], {}),
        "no folder": ([f"--database=sqlite:///{folder}/nowhere/c.db", *listen], {}),
        "newer schema": ([f"--database=sqlite:///{newer}", *listen], {}),
        "no place for addresses": ([database, *listen, f"--addresses-file={folder}/nowhere/a.json"], {}),
        "settings": (["--config", str(config), "--grpc-listen", "everywhere"], {"ALLOCSCOPE_COMMIT_BATCHES": "0"}),
    }
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ALLOCSCOPE_")}
    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        input=json.dumps(list(cases.values())),
        capture_output=True,
        text=True,
        timeout=60,
        env=clean,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert newer.read_bytes() == before
    said = {name: (status, text) for name, (status, text) in zip(cases, json.loads(done.stdout), strict=True)}
    return folder, said


@pytest.mark.parametrize(("what", "flag"), [("gRPC", "--grpc-listen"), ("HTTP", "--http-listen")])
def test_an_address_that_is_taken_is_named(running, starts, what, flag):
    taken = {"gRPC": running.grpc, "HTTP": running.http}[what]
    status, said = starts[1][f"{what} taken"]
    assert (status, said.splitlines()[-1]) == (
        1,
        f"allocscope collector: cannot serve {what} on {taken}: Address already in use ({flag} names another; is a collector running already?)",
    )


def test_a_folder_that_is_not_there_is_named(starts):
    folder, said = starts
    path = f"{folder}/nowhere/c.db"
    why = f"there is no folder {folder}/nowhere (it must be a folder and file that this user may write)"
    assert said["no folder"] == (1, f"allocscope collector: cannot open sqlite:///{path}: {path}: {why}\n")


def test_a_database_of_a_newer_schema_is_left_alone(starts):
    status, said = starts[1]["newer schema"]
    assert status == 1
    assert "newer.db: its schema is of revision '9999'" in said
    assert "upgrade this Allocscope, or name another database" in said
    assert len(said.splitlines()) == 1


def test_everything_that_is_wrong_with_the_settings_is_said_at_once(starts):
    folder, said = starts
    status, text = said["settings"]
    assert status == 2
    assert [line.strip() for line in text.splitlines()] == [
        f"allocscope collector: 6 problem(s) with the settings; the file is {folder}/collector.toml",
        "databse is not a setting, but is in the file (did you mean 'database'?)",
        "--grpc-listen is 'everywhere': must be HOST:PORT, with a PORT from 0 to 65535 and an IPv6 HOST in brackets",
        "webhook is '…': must begin with http:// or https://",
        "retire_after_s is 1: must be from 5 to 604800",
        "queue_bytes is 'much': must be a whole number",
        "ALLOCSCOPE_COMMIT_BATCHES is '0': must be from 1 to 4096",
    ]


def test_an_addresses_file_that_cannot_be_written_is_named(starts):
    folder, said = starts
    status, text = said["no place for addresses"]
    assert (status, text.splitlines()[-1]) == (
        1,
        f"allocscope collector: cannot write {folder}/nowhere/a.json: No such file or directory (--addresses-file names another)",
    )


def test_a_database_that_others_hold_locked_is_a_clear_error(monkeypatch, capsys):
    def refuse(settings):
        raise StorageBusy("the database is busy; try again")

    monkeypatch.setattr("allocscope.collector.app.run", refuse)
    assert main(["--database", "sqlite:////x/c.db"]) == 1
    assert capsys.readouterr().err == "allocscope collector: the database is busy; try again\n"


def test_nothing_of_ours_is_on_a_terminal_but_what_it_says(starts):
    assert [name for name, (_, text) in starts[1].items() if "Traceback" in text] == []


def test_without_a_name_the_database_goes_where_state_belongs():
    assert default_database({}, root=True) == "sqlite:////var/lib/allocscope/collector.db"
    assert (
        default_database({"XDG_STATE_HOME": "/s", "HOME": "/h"}, root=False) == "sqlite:////s/allocscope/collector.db"
    )
    assert default_database({"HOME": "/h"}, root=False) == "sqlite:////h/.local/state/allocscope/collector.db"


def test_an_oom_reaches_a_webhook_and_it_ends_in_order(tmp_path, httpserver):
    """From a daemon's stream to somebody's hook; then Ctrl-C, with a daemon on the line."""
    httpserver.expect_oneshot_request("/hook", method="POST").respond_with_data("")
    oom = Event(f"{1:032x}", 2, 1_700_000_002_000_000, EventKind.OOM, "GPU-1", requested_bytes=1 << 30)
    process = CollectorProcess(tmp_path, "--webhook", httpserver.url_for("/hook"), "--log-format", "json")
    try:
        process.ready()
        with httpserver.wait(timeout=20) as waiting, stream(process.grpc) as it:
            it.batch(batch(1, sample(1), events=[wire.event_to_wire(oom)]))
            it.until(1)
            process.wait_until_said("AllocscopeOOM")
            assert process.stop(signal.SIGINT) == 0
    finally:
        process.stop()
    assert waiting.result
    told = httpserver.log[0][0].get_json()
    assert (told["name"], told["state"], told["labels"]["job"]) == ("AllocscopeOOM", "firing", "train")
    levels = [json.loads(line)["level"] for line in process.said[:-1]]
    assert set(levels) == {"info"}, process.said
