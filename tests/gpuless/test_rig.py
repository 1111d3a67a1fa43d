"""The rig is right: what the real allocator does in it is what it does, to the byte; and the accounts agree."""

import os

import pytest

from tests.gpuless import build
from tests.gpuless.rig import GIB, MIB, JobError, Rig

ROW = (
    "requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes", "inactive_split_bytes", "inactive_split", "segment", "allocation",
)  # fmt: skip

PRELUDE = f"""
held = {{}}
def alloc(name, size):
    held[name] = torch.empty(size, dtype=torch.uint8, device="cuda")
def row():
    stats = torch.cuda.memory_stats()
    return [stats[f"{{name}}.all.current"] for name in {ROW}] + [stats["num_device_alloc"], stats["num_device_free"]]
"""

# ALLOCATOR.md 12 in words: a program, and what the counters are after each step (PyTorch 2.14.1, one stream).
STEPS = [
    ("alloc('a', 1000)", [1000, 1024, 1024, 2097152, 2096128, 1, 1, 1, 1, 0]),
    ("alloc('b', 3145728)", [3146728, 3146752, 3146752, 23068672, 19921920, 2, 2, 2, 2, 0]),
    ("alloc('c', 9961472)", [13108200, 13108224, 13108224, 23068672, 9960448, 2, 2, 3, 2, 0]),
    ("alloc('d', 31457281)", [44565481, 44566016, 44566016, 56623104, 12057088, 3, 3, 4, 3, 0]),
    ("del held['b']", [41419753, 41420288, 41420288, 56623104, 15202816, 4, 3, 3, 3, 0]),
    ("alloc('e', 2621440)", [44041193, 44566016, 44566016, 56623104, 12057088, 3, 3, 4, 3, 0]),
    ("del held['d']", [12583912, 13108224, 13108224, 56623104, 9960448, 2, 3, 3, 3, 0]),
    ("alloc('f', 31457280)", [44041192, 44565504, 44565504, 56623104, 12057600, 3, 3, 4, 3, 0]),
    ("alloc('g', 1048577)", [45089769, 46662656, 46662656, 56623104, 9960448, 2, 3, 5, 3, 0]),
    ("del held['c']", [35128297, 36701184, 36701184, 56623104, 19921920, 2, 3, 4, 3, 0]),
    ("del held['e']", [32506857, 33555456, 33555456, 56623104, 2096128, 1, 3, 3, 3, 0]),
    ("del held['g']", [31458280, 31458304, 31458304, 56623104, 4193280, 2, 3, 2, 3, 0]),
    ("del held['f']", [1000, 1024, 1024, 56623104, 2096128, 1, 3, 1, 3, 0]),
    ("torch.cuda.empty_cache()", [1000, 1024, 1024, 2097152, 2096128, 1, 1, 1, 3, 2]),
    ("del held['a']", [0, 0, 0, 2097152, 0, 0, 1, 0, 3, 2]),
    ("torch.cuda.empty_cache()", [0, 0, 0, 0, 0, 0, 0, 0, 3, 3]),
]
AT_THE_END = {
    "allocation.all.allocated": 7,
    "allocated_bytes.all.allocated": 81266176,
    "requested_bytes.all.allocated": 79692778,
    "reserved_bytes.all.allocated": 56623104,
    "allocated_bytes.all.peak": 46662656,
    "requested_bytes.all.peak": 45089769,
    "inactive_split.all.peak": 4,
    "inactive_split_bytes.all.peak": 19921920,
}
EXPANDABLE = [  # allocated where it is said to differ, reserved, device allocs, device frees
    (1024, 2097152, 1, 0), (3146752, 23068672, 2, 0), (13108224, 23068672, 2, 0), (44566016, 65011712, 3, 0), (41420288, 65011712, 3, 0),
    (44041728, 65011712, 3, 0), (12583936, 65011712, 3, 0), (44041216, 65011712, 3, 0), (45090304, 65011712, 3, 0), (35128832, 65011712, 3, 0),
    (32507392, 65011712, 3, 0), (31458304, 65011712, 3, 0), (1024, 65011712, 3, 0), (1024, 2097152, 3, 1), (0, 2097152, 3, 1), (0, 0, 3, 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A job, and its rig, that many of these tests use one after the other: each leaves it as it was."""
    rig = Rig(tmp_path_factory.mktemp("shared"), devices=2)
    with rig.shell() as job:
        job(PRELUDE)
        yield rig, job


def test_the_worked_example_comes_out_to_the_byte(rig):
    with rig.shell() as job:
        job(PRELUDE)
        assert [job(f"{step}\nrow()") for step, _ in STEPS] == [row for _, row in STEPS]
        stats = job("torch.cuda.memory_stats()")
        assert {name: stats[name] for name in AT_THE_END} == AT_THE_END


def test_the_worked_example_comes_out_with_expandable_segments(rig):
    with rig.shell({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) as job:
        job(PRELUDE)
        rows = [job(f"{step}\nrow()") for step, _ in STEPS]
    assert [(row[1], row[3], row[8], row[9]) for row in rows] == EXPANDABLE
    assert {tuple(row[4:7]) for row in rows} == {(0, 0, 0)}


def test_an_out_of_memory_error_tells_the_whole_account(shared):
    _, job = shared
    job("alloc('a', 1 << 30)")
    with pytest.raises(JobError) as raised:
        job("torch.empty(40 << 30, dtype=torch.uint8, device='cuda')")
    job("del held['a']; torch.cuda.empty_cache()")
    assert raised.value.type_name == "OutOfMemoryError"
    assert raised.value.text.startswith(
        "CUDA out of memory. Tried to allocate 40.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 22.51 GiB is free. "
        "Including non-PyTorch memory, this process has 1.49 GiB memory in use. Of the allocated memory 1024.00 MiB is allocated by PyTorch, "
        "and 0 bytes is reserved by PyTorch but unallocated."
    )


def test_what_a_process_holds_is_its_context_and_its_segments(shared):
    rig, job = shared
    job("alloc('a', 30 << 20)")
    assert rig.holders() == {job.pid: 500 * MIB + 30 * MIB}
    assert job("torch.cuda.mem_get_info()") == [24 * GIB - 530 * MIB, 24 * GIB]
    job("del held['a']; torch.cuda.empty_cache()")
    assert rig.holders() == {job.pid: 500 * MIB}


def test_processes_see_what_each_other_hold_and_a_killed_one_holds_nothing(rig):
    with rig.shell() as first, rig.shell() as second:
        second("x = torch.empty(20 << 30, dtype=torch.uint8, device='cuda')")
        first("torch.cuda.init()")
        assert first("torch.cuda.mem_get_info()[0]") == 4 * GIB - 1000 * MIB
        with pytest.raises(JobError, match=f"Process {second.pid} has 20.49 GiB memory in use"):
            first("torch.empty(5 << 30, dtype=torch.uint8, device='cuda')")
        second.process.kill()
        second.process.wait()
        assert first("torch.cuda.mem_get_info()[0]") == 24 * GIB - 500 * MIB
        assert rig.holders() == {first.pid: 500 * MIB}
        assert first("torch.empty(5 << 30, dtype=torch.uint8, device='cuda').numel()") == 5 * GIB


def test_nvml_tells_what_cuda_tells(shared):
    rig, job = shared
    job("alloc('a', 30 << 20); torch.cuda.set_device(1); alloc('b', 50 << 20); torch.cuda.set_device(0)")
    told = []
    with rig.nvml_shell() as nvml:
        nvml("N = pynvml; N.nvmlInit(); handles = [N.nvmlDeviceGetHandleByIndex(index) for index in range(2)]")
        for device in range(2):
            told.append(nvml(f"N.nvmlDeviceGetMemoryInfo(handles[{device}], version=N.nvmlMemory_v2).free"))
            processes = nvml(
                f"[(p.pid, p.usedGpuMemory) for p in N.nvmlDeviceGetComputeRunningProcesses(handles[{device}])]"
            )
            assert dict(processes) == rig.holders(device) == {job.pid: rig.used_bytes(device)}
    assert told == job("[torch.cuda.mem_get_info(device)[0] for device in range(2)]")
    assert told == [24 * GIB - 530 * MIB, 24 * GIB - 550 * MIB]
    job("held.clear(); torch.cuda.empty_cache()")


def test_all_that_pytorch_calls_of_the_runtime_is_written():
    """But for what its NVSHMEM imports, which these jobs never use; of cuBLAS the build writes the rest."""
    assert [name for name in build.unwritten() if not name.startswith("cublas")] == ["cudaLaunchCooperativeKernel"]


# The file with the function that the linker binds a library's call to: the first of the name in the process.
ANSWERS = """
import ctypes
class Found(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("address", ctypes.c_void_p)]
def answers(name):
    process, found = ctypes.CDLL(None), Found()
    assert process.dladdr(ctypes.cast(getattr(process, name), ctypes.c_void_p), ctypes.byref(found))
    return found.file.decode()
"""


@pytest.mark.parametrize(
    ("called", "library"),
    [
        ("cudaMalloc", "libcudart.so.13"),
        ("cudaLaunchKernel", "libcudart.so.13"),
        ("cublasCreate_v2", "libgpuless-cublas.so"),
        ("cuLaunchKernel", "libcuda.so.1"),
    ],
)
def test_what_pytorch_calls_of_cuda_are_the_stand_ins(shared, called, library):
    """Its own start maps the real runtime too, by its path; nothing of that is called."""
    rig, job = shared
    job(ANSWERS)
    assert job(f"answers({called!r})") == os.fspath(rig.natives / library)
