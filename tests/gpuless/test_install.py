"""The rig's PyTorch is made once, wholly or not at all, and only where there is room."""

import subprocess
import threading

import pytest

from tests.gpuless import install
from tests.gpuless.install import InstallError


class Fill:
    """In the place of pip: counts, and makes what `is_complete` looks for; `may_end` holds it up, `error` ends it."""

    def __init__(self):
        self.count, self.error = 0, None
        self.began, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def __call__(self):
        self.count += 1
        self.began.set()
        assert self.may_end.wait(30)
        if self.error:
            raise self.error
        install.python().parent.mkdir(parents=True)
        install.python().touch(0o755)


@pytest.fixture
def fill(tmp_path, monkeypatch):
    made = Fill()
    monkeypatch.setenv("ALLOCSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(install, "_fill", made)
    return made


@pytest.mark.parametrize(
    ("environ", "home"),
    [
        ({"HOME": "/h"}, "/h/.cache/allocscope/gpuless/torch-2.14.1"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/allocscope/gpuless/torch-2.14.1"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x", "ALLOCSCOPE_CACHE": "/a"}, "/a/gpuless/torch-2.14.1"),
    ],
)
def test_it_lies_in_the_users_cache(monkeypatch, environ, home):
    for name in ("HOME", "XDG_CACHE_HOME", "ALLOCSCOPE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert str(install.home()) == home


def test_it_is_made_once(fill):
    assert not install.is_complete()
    install.make()
    assert install.is_complete()
    install.make()
    assert fill.count == 1


def test_a_half_made_one_is_made_anew(fill):
    half = install.home() / "lib" / "half"
    half.parent.mkdir(parents=True)
    half.touch()
    install.make()
    assert not half.exists()
    assert install.is_complete()


def test_one_of_another_version_is_made_anew(fill):
    install.make()
    (install.home() / ".complete").write_text("torch==2.0.1\n")
    assert not install.is_complete()
    install.make()
    assert fill.count == 2


def test_a_failure_leaves_it_incomplete(fill):
    fill.error = InstallError("no network")
    with pytest.raises(InstallError, match="no network"):
        install.make()
    assert not install.is_complete()
    fill.error = None
    install.make()
    assert install.is_complete()


def test_a_second_one_waits_for_the_first(fill, monkeypatch):
    waits = threading.Event()
    monkeypatch.setattr(install, "_say", lambda what: waits.set() if what.startswith("waiting") else None)
    fill.may_end.clear()
    both = [threading.Thread(target=install.make) for _ in range(2)]
    for one in both:
        one.start()
    assert waits.wait(30)
    fill.may_end.set()
    for one in both:
        one.join(30)
    assert fill.count == 1
    assert install.is_complete()


def test_without_room_it_says_how_much_it_needs(fill, monkeypatch):
    monkeypatch.setattr(install, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(
        InstallError, match=r"has .* GiB left, and the rig's PyTorch needs 1073741824 GiB .*ALLOCSCOPE_CACHE="
    ):
        install.make()
    assert fill.count == 0


def test_the_one_here_is_what_it_is_to_be():
    assert subprocess.run([install.python(), "-c", install.CHECK], check=False).returncode == 0
