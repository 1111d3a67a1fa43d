"""What a test uses: pretend devices, the environment in which a process sees them, and what is to go wrong with them."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpuless import build, install

MIB = 1 << 20
GIB = 1 << 30
PROCESSES = 256
"""GPULESS_PROCESSES."""
SHELL = Path(__file__).resolve().parent / "shell.py"


@dataclass(frozen=True, slots=True)
class Instance:
    """A MIG instance of a device."""

    capacity_bytes: int = 10 * GIB
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """A pretend device. What is None is made up from its place, always alike."""

    capacity_bytes: int = 24 * GIB
    """What CUDA tells as the total."""
    driver_bytes: int = 512 * MIB
    """The driver's own, which NVML's total has more."""
    name: str = "NVIDIA H100 80GB HBM3 (pretended)"
    uuid: str | None = None
    bus_id: str | None = None
    """NVML's form: 00000000:01:00.0."""
    cuda_rank: int | None = None
    """Its place in CUDA's own order; NVML's is by bus."""
    instances: Sequence[Instance] = ()
    """With any, it is in MIG mode."""


class JobError(Exception):
    """What a job raised: the name of its type, and its text."""

    def __init__(self, type_name: str, text: str, traceback: str = "") -> None:
        super().__init__(f"{type_name}: {text}")
        self.type_name, self.text, self.traceback = type_name, text, traceback


class Shell:
    """A job that runs what a test says (shell.py); `torch` is imported in it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    def __call__(self, code: str) -> Any:
        """Run this; what its last expression gives, as JSON has it (a tuple is a list). Raises JobError."""
        self.send(code)
        return self.answer()

    def send(self, code: str) -> None:
        """Have it run this, without waiting."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """What the oldest piece that was sent gave. Raises JobError."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise JobError("EOFError", f"the job has ended ({self.process.wait()})")
        told = json.loads(line)
        if "error" in told:
            raise JobError(told["error"], told["text"], told["traceback"])
        return told["value"]


class Rig:
    """Pretend devices, in a folder of their own, for whatever processes are started with `environ`.

    A device's number is its place in NVML's order. A MIG instance has one too: they follow the device that they are part of.
    """

    def __init__(
        self,
        directory: Path,
        devices: int | Sequence[Device] = 1,
        *,
        capacity_bytes: int = 24 * GIB,
        context_bytes: int = 500 * MIB,
        old_driver: bool = False,
    ) -> None:
        """A directory that has devices already keeps them.

        `devices`: how many, each with `capacity_bytes`, or which. `context_bytes`: what a process takes of a device by using it.
        `old_driver`: NVML has no calls that came after driver 470. Raises BuildError.
        """
        self.directory = Path(directory) / "gpuless"
        self.directory.mkdir(parents=True, exist_ok=True)
        self.natives = build.natives()
        self._old_driver = old_driver
        self._library = _library(self.natives)
        with (self.directory / "making").open("w") as making:
            fcntl.flock(making, fcntl.LOCK_EX)
            is_new = not (self.directory / "state").exists()
            if is_new:
                self._library.gpuless_make(os.fsencode(self.directory), context_bytes)
            self._rig = self._library.gpuless_open(os.fsencode(self.directory))
            if not self._rig:
                raise OSError(f"no state of this version of the rig in {self.directory}; take another folder")
            if is_new:
                wished = [Device(capacity_bytes)] * devices if isinstance(devices, int) else devices
                for place, device in enumerate(wished):
                    self._add(place, device)

    def _add(self, place: int, device: Device) -> None:
        whole = _NativeDevice(
            device.name.encode(),
            (device.uuid or _uuid("GPU", place)).encode(),
            (device.bus_id or f"00000000:{place + 1:02X}:00.0").encode(),
            device.capacity_bytes,
            device.driver_bytes,
            place if device.cuda_rank is None else device.cuda_rank,
            -1,
            -1,
        )
        number = self._library.gpuless_add_device(self._rig, ctypes.byref(whole))
        for index, instance in enumerate(device.instances):
            part = _NativeDevice.from_buffer_copy(whole)
            part.name = f"{device.name} MIG {instance.capacity_bytes // GIB}g".encode()
            part.uuid = (instance.uuid or _uuid("MIG", 100 * (place + 1) + index)).encode()
            part.capacity_bytes, part.driver_bytes = instance.capacity_bytes, 0
            part.parent, part.instance = number, index + 1
            self._library.gpuless_add_device(self._rig, ctypes.byref(part))

    # what a process needs

    @property
    def python(self) -> Path:
        """The Python that has the CUDA build of PyTorch."""
        return install.python()

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a job; has nothing of this process's that would change what CUDA or PyTorch does."""
        foreign = ("CUDA_", "PYTORCH_", "TORCH_", "GPULESS_", "PYTHON")
        return {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | self.settings

    @property
    def settings(self) -> dict[str, str]:
        """What `environ` has more than this process's."""
        preload = [self.natives / "libcudart.so.13", self.natives / "libgpuless-cublas.so"]
        return self.nvml_settings | {"LD_PRELOAD": ":".join(map(os.fspath, preload)), "PYTHONPATH": build.python_path()}

    @property
    def nvml_settings(self) -> dict[str, str]:
        """What a process needs that only looks at the devices by NVML, as the daemon: whichever Python it is."""
        folders = [self.natives / "old", self.natives] if self._old_driver else [self.natives]
        return {"GPULESS_DIR": os.fspath(self.directory), "LD_LIBRARY_PATH": ":".join(map(os.fspath, folders))}

    def run(
        self, *arguments: str | Path, environ: Mapping[str, str] | None = None, timeout_s: float = 100
    ) -> subprocess.CompletedProcess[str]:
        """The rig's Python with these arguments, to its end."""
        return subprocess.run(
            [self.python, *arguments],
            env=self.environ | dict(environ or {}),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )

    def start(
        self, *arguments: str | Path, environ: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """The rig's Python with these arguments, by pipes; who calls this ends it."""
        piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen([self.python, *arguments], env=self.environ | dict(environ or {}), **(piped | options))

    @contextmanager
    def shell(self, environ: Mapping[str, str] | None = None, *, module: str = "torch") -> Iterator[Shell]:
        """A job to talk with, which ends with the block; it has imported `module`. What it prints comes to this process's stderr."""
        with self._talking([self.python, SHELL, module], self.environ | dict(environ or {})) as shell:
            yield shell

    @contextmanager
    def nvml_shell(self, environ: Mapping[str, str] | None = None) -> Iterator[Shell]:
        """The same in this process's Python, with `pynvml`, as the daemon has it."""
        settings = dict(os.environ) | self.nvml_settings | dict(environ or {})
        with self._talking([sys.executable, SHELL, "pynvml"], settings) as shell:
            yield shell

    @contextmanager
    def _talking(self, command: Sequence[str | Path], environ: Mapping[str, str]) -> Iterator[Shell]:
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                yield Shell(process)
            finally:
                process.kill()

    # what is

    def uuid(self, device: int = 0) -> str:
        """As NVML tells it."""
        told: bytes = _NativeDevice.from_address(self._library.gpuless_device(self._rig, device)).uuid
        return told.decode()

    def holders(self, device: int = 0) -> dict[int, int]:
        """The bytes that each living process holds of a device, its context among them, by pid."""
        pids, used = (ctypes.c_int32 * PROCESSES)(), (ctypes.c_uint64 * PROCESSES)()
        found = self._library.gpuless_holders(self._rig, device, PROCESSES, pids, used)
        return dict(zip(pids[:found], used[:found], strict=True))

    def used_bytes(self, device: int = 0) -> int:
        """What all processes hold of a device."""
        return int(self._library.gpuless_used(self._rig, device))

    def make_up(self, pid: int, used_bytes: int, device: int = 0) -> None:
        """A process that holds so much of a device, whether or not there is one with this pid; 0: it holds nothing any more."""
        if self._library.gpuless_make_up(self._rig, pid, device, used_bytes):
            raise OSError(f"more than {PROCESSES} processes in {self.directory}")

    # what goes wrong

    def fail(self, *faults: str) -> None:
        """From now on this goes wrong, in processes that run already too, and nothing else; README.md has what can."""
        aside = self.directory / "faults.new"
        aside.write_text("".join(f"{fault}\n" for fault in faults))
        aside.rename(self.directory / "faults")


class _NativeDevice(ctypes.Structure):
    """struct gpuless_device."""

    _fields_ = (
        ("name", ctypes.c_char * 96),
        ("uuid", ctypes.c_char * 96),
        ("bus_id", ctypes.c_char * 32),
        ("capacity_bytes", ctypes.c_uint64),
        ("driver_bytes", ctypes.c_uint64),
        ("cuda_rank", ctypes.c_int32),
        ("parent", ctypes.c_int32),
        ("instance", ctypes.c_int32),
    )


def _uuid(kind: str, number: int) -> str:
    return f"{kind}-{uuid.uuid5(uuid.NAMESPACE_OID, f'allocscope gpuless {kind} {number}')}"


def _library(natives: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(os.fspath(natives / "libgpuless.so"))
    rig = ctypes.c_void_p
    library.gpuless_make.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
    library.gpuless_open.restype = library.gpuless_device.restype = rig
    library.gpuless_used.restype = ctypes.c_uint64
    library.gpuless_device.argtypes = library.gpuless_used.argtypes = [rig, ctypes.c_int]
    library.gpuless_add_device.argtypes = [rig, ctypes.POINTER(_NativeDevice)]
    library.gpuless_make_up.argtypes = [rig, ctypes.c_int, ctypes.c_int, ctypes.c_uint64]
    library.gpuless_holders.argtypes = [rig, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    return library
