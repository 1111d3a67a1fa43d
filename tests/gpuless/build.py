"""The stand-ins, compiled from `native/` for the rig's PyTorch, and what a job of the working tree needs beside it.

Both lie in `.cache/gpuless`, under the hash of what they are made from: what is unchanged is not made again, and what a running
job uses stays as it is.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.gpuless import install

REPO = Path(__file__).resolve().parent.parent.parent
NATIVE = Path(__file__).resolve().parent / "native"
CACHE = REPO / ".cache" / "gpuless"
KEPT = 4
"""How many of a kind stay in the cache: a job may run on an earlier one."""
ROOTS = ("proto", "allocator", "probe", "daemon", "alerts", "storage", "collector", "cli")
NO_COMPILER = "no C compiler here; on Debian or Ubuntu type: sudo apt-get install gcc libc6-dev"

STRICT = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror")
SHARED = ("-shared", "-fPIC", "-pthread", "-fvisibility=hidden")
BESIDE = ("-Wl,-rpath,$ORIGIN", "-Wl,-rpath,$ORIGIN/..")
"""The stand-ins find each other where they lie."""
CORE = ("state.c", "context.c", "devices.c", "faults.c", "addresses.c")
RUNTIME = ("runtime_device.c", "runtime_memory.c", "runtime_streams.c", "runtime_driver.c")
RUNTIME_VERSION = "libcudart.so.13"
NOT_SUPPORTED = 801
"""cudaErrorNotSupported: the runtime's answer for what `native/` does not have (something of NVSHMEM's)."""
IMPORTED = re.compile(r"^\s+U ((?:__)?cuda[A-Z]\w+|cublas\w+)", re.MULTILINE)
EXPORTED = re.compile(r"^EXPORT [^(]*?\b(\w+)\(", re.MULTILINE)


class BuildError(Exception):
    """The stand-ins cannot be built; says why."""


def natives() -> Path:
    """The folder of the stand-ins, built where they are not yet. Raises BuildError."""
    sources = [path.read_bytes() for path in sorted(NATIVE.iterdir())]
    return _made("native", [*sources, Path(__file__).read_bytes(), os.fsencode(install.home())], _compile_all)


def companions() -> Path:
    """The folder of what Allocscope's probe needs in the rig's Python: protobuf, as requirements/dev.txt pins it."""
    pinned = re.findall(r"^(protobuf==[^ ;\\]+)", (REPO / "requirements" / "dev.txt").read_text(), re.MULTILINE)
    parts = [*map(os.fsencode, pinned), os.fsencode(install.home())]
    return _made("site", parts, lambda folder: _install_into(folder, pinned))


def python_path() -> str:
    """A PYTHONPATH with the working tree's Allocscope."""
    return os.pathsep.join([*(os.fspath(REPO / root) for root in ROOTS), os.fspath(companions())])


def unwritten() -> list[str]:
    """What PyTorch imports of cuBLAS and the CUDA runtime, and `native/` does not have."""
    written = {name for path in NATIVE.glob("*.c") for name in EXPORTED.findall(path.read_text())}
    libraries = sorted((_packages() / "torch" / "lib").glob("*.so"))
    listed = _run(["nm", "-D", "--undefined-only", *map(os.fspath, libraries)])
    return sorted(set(IMPORTED.findall(listed)) - written)


# --- folders named by their content ---------------------------------------------------------------------------------------


def _made(name: str, parts: Iterable[bytes], make: Callable[[Path], None]) -> Path:
    """The folder of this content; made aside and then named, so that whoever sees it sees the whole."""
    content = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]
    folder = CACHE / f"{name}-{content}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=CACHE))
        try:
            make(aside)
            aside.rename(folder)
            _forget_early_ones(name)
        except OSError:
            if not folder.exists():  # where it is, another one was faster
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def _forget_early_ones(name: str) -> None:
    for folder in sorted(CACHE.glob(f"{name}-*"), key=lambda folder: folder.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(folder, ignore_errors=True)


# --- the stand-ins ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Linker:
    """Makes shared libraries that find each other, in one folder."""

    compiler: str
    folder: Path

    def __call__(self, name: str, sources: Iterable[str | Path], *options: str) -> None:
        target = self.folder / name
        target.parent.mkdir(exist_ok=True)
        headers = ["-I", os.fspath(NATIVE), "-isystem", os.fspath(_headers())]
        paths = [os.fspath(NATIVE / source) for source in sources]
        there = ["-o", os.fspath(target), f"-Wl,-soname,{target.name}", f"-L{self.folder}", *BESIDE]
        _run([self.compiler, *STRICT, *SHARED, *headers, *paths, *there, *options])


def _compile_all(folder: Path) -> None:
    if not (compiler := shutil.which("gcc") or shutil.which("cc")):
        raise BuildError(NO_COMPILER)
    link = _Linker(compiler, folder)
    rest = _write_rest(folder)
    link("libgpuless.so", CORE)
    link("libnvidia-ml.so.1", ["nvml.c"], "-lgpuless")
    link("old/libnvidia-ml.so.1", ["nvml.c"], "-lgpuless", "-DOLD_DRIVER")
    link("libcuda.so.1", ["driver.c", "driver_nothing.c"], "-lgpuless")
    link("libgpuless-cublas.so", ["cublas.c", rest["cublas"]])
    (folder / "versions").write_text(f"{RUNTIME_VERSION} {{ *; }};\n")
    driver = ("-Wl,--no-as-needed", "-l:libcuda.so.1")
    link(
        "libcudart.so.13", [*RUNTIME, rest["cuda"]], "-lgpuless", *driver, f"-Wl,--version-script={folder / 'versions'}"
    )
    link("libgpuless-pluggable.so", ["pluggable.c"], "-l:libcudart.so.13")


def _write_rest(folder: Path) -> dict[str, Path]:
    """A source for what is imported and not written: cuBLAS succeeds, the runtime does not support it."""
    names = unwritten()
    written = {}
    for kind, code in (("cublas", 0), ("cuda", NOT_SUPPORTED)):
        answers = [
            f"EXPORT int {name}(void) {{ return {code}; }}\n" for name in names if name.lstrip("_").startswith(kind)
        ]
        written[kind] = folder / f"{kind}_rest.c"
        written[kind].write_text('#include "gpuless.h"\n' + "".join(answers))
    return written


def _packages() -> Path:
    """The site-packages of the rig's PyTorch."""
    return next((install.home() / "lib").glob("python3*/site-packages"))


def _headers() -> Path:
    """Those of CUDA, which come with Triton."""
    return _packages() / "triton" / "backends" / "nvidia" / "include"


def _install_into(folder: Path, requirements: Iterable[str]) -> None:
    pip = [os.fspath(install.python()), "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
    _run([*pip, "install", "--no-deps", "--target", os.fspath(folder), *requirements])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise BuildError(f"{command[0]} failed ({done.returncode}):\n{done.stderr}")
    return done.stdout
