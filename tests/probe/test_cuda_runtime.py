"""The CUDA runtime by ctypes: asked only where that makes no context and spoils no CUDA graph, by each thread for itself."""

import ctypes
import threading

import pytest

from allocscope.probe import cuda_runtime
from allocscope.probe.cuda_runtime import CudaRuntime

GIB = 1 << 30


class Library:
    """What ctypes gives of libcudart, with its calls noted; `errors` has what each gives but 0."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.errors: dict[str, int] = {}
        prototype = ctypes.CFUNCTYPE
        number, size = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_size_t)
        self.cudaThreadExchangeStreamCaptureMode = prototype(ctypes.c_int, number)(self._exchange)
        self.cudaSetDevice = prototype(ctypes.c_int, ctypes.c_int)(self._set_device)
        self.cudaMemGetInfo = prototype(ctypes.c_int, size, size)(self._memory_info)

    def _exchange(self, mode):
        return self._called("mode", mode[0])

    def _set_device(self, index):
        return self._called("device", index)

    def _memory_info(self, free, total):
        free[0], total[0] = 70 * GIB, 80 * GIB
        return self._called("info")

    def _called(self, name, *told):
        self.calls.append(" ".join(map(str, (name, *told))))
        return self.errors.get(name, 0)


def test_a_thread_moves_to_the_device_and_is_relaxed_before_it_asks():
    library = Library()
    runtime = CudaRuntime(library)
    assert [runtime.memory_info(index) for index in (1, 0)] == [(70 * GIB, 80 * GIB)] * 2
    assert library.calls == ["device 1", "mode 2", "info", "device 0", "info"]


def test_each_thread_is_relaxed_by_itself():
    library = Library()
    runtime = CudaRuntime(library)
    for _ in range(2):
        thread = threading.Thread(target=runtime.memory_info, args=(0,))
        thread.start()
        thread.join()
    assert library.calls == ["device 0", "mode 2", "info"] * 2


@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        ("device", ["device 0"] * 2),
        ("mode", ["device 0", "mode 2", "device 0"]),
        ("info", ["device 0", "mode 2", "info", "device 0", "info"]),
    ],
)
def test_what_fails_is_unknown_and_nothing_is_asked_after_it(fails, calls):
    library = Library()
    library.errors = {fails: 1}
    runtime = CudaRuntime(library)
    assert [runtime.memory_info(0) for _ in range(2)] == [None, None]
    assert library.calls == calls


def test_the_runtime_that_is_loaded_is_taken(monkeypatch):
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: library)
    found = cuda_runtime.loaded("13.0")
    assert found is not None
    assert found.memory_info(0) == (70 * GIB, 80 * GIB)


@pytest.mark.parametrize("version", ["13.0", None, "no/such"])
def test_no_runtime_is_loaded_where_there_is_none(version):
    assert cuda_runtime.loaded(version) is None
