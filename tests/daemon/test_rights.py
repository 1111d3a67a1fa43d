"""What is lost without root is said, and so is a folder in which others could put a socket in the daemon's place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from allocscope.daemon.procfs import Procfs
from allocscope.daemon.rights import folder_risk, what_is_lost

ALL, NONE = "000001ffffffffff", "0000000000000000"
ENVIRONMENTS = "without root or CAP_SYS_PTRACE the environments of other users' processes are closed"
HIDDEN = "other users' processes are hidden in /proc (hidepid)"


def proc(root: Path, *, uid: int, capabilities: str, hidden: bool = False) -> Procfs:
    (root / "self").mkdir(parents=True)
    (root / "self" / "status").write_text(f"Name:\tpython\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapEff:\t{capabilities}\n")
    if not hidden:
        (root / "1").mkdir()
        (root / "1" / "stat").write_text("1 (init) S 0")
    return Procfs(root)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="as-") as name:
        yield Path(name)


@pytest.mark.parametrize(
    ("uid", "capabilities", "hidden", "lost"),
    [
        pytest.param(0, ALL, False, [], id="root"),
        pytest.param(1000, "0000000000080000", False, [], id="a user with CAP_SYS_PTRACE"),
        pytest.param(1000, NONE, False, [ENVIRONMENTS], id="a user"),
        pytest.param(1000, NONE, True, [ENVIRONMENTS, HIDDEN], id="a user, hidepid"),
        pytest.param(0, NONE, False, [ENVIRONMENTS], id="root of a container without capabilities"),
    ],
)
def test_what_a_daemon_may_not_is_told(tmp_path, uid, capabilities, hidden, lost):
    told = what_is_lost(proc(tmp_path, uid=uid, capabilities=capabilities, hidden=hidden), tmp_path / "kubelet.sock")
    assert [text.partition(":")[0] for text in told] == lost


def test_a_kubelet_that_is_root_s_alone_is_told(tmp_path):
    kubelet = tmp_path / "kubelet.sock"
    kubelet.touch(0o600)
    if os.geteuid() == 0:
        os.chown(kubelet, 54321, -1)
    procfs = proc(tmp_path / "proc", uid=1000, capabilities=ALL)
    (told,) = what_is_lost(procfs, kubelet)
    assert told == f"{kubelet} is closed to it: pods have the names only that the kubelet's log folders tell"


def test_a_process_that_is_not_to_be_seen_is_not_judged(tmp_path):
    assert what_is_lost(Procfs(tmp_path), tmp_path / "none", pid=17) == ()


@pytest.mark.parametrize(
    ("mode", "risk"),
    [
        (0o755, None),
        (0o1777, None),
        (0o777, "every user may write to {} (mode 0777), and so could put another socket in the daemon's place"),
        (0o775, "the group {gid} may write to {} (mode 0775), and so could put another socket in the daemon's place"),
    ],
)
def test_a_folder_that_others_may_write_to_is_told_of(folder, mode, risk):
    folder.chmod(mode)
    expected = risk and risk.replace("{gid}", str(folder.stat().st_gid)).replace("{}", str(folder))
    assert folder_risk(folder / "daemon.sock", os.geteuid()) == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_s_is_told_of(folder):
    os.chown(folder, 54321, -1)
    text = f"{folder} is user 54321's, who could put another socket in the daemon's place"
    assert folder_risk(folder / "daemon.sock", 0) == text
    assert folder_risk(folder / "daemon.sock", 54321) is None
