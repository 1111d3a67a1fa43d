"""Texts of further devices, versions and libraries, as people posted them, with what they say and prove."""

import pytest

from allocscope.allocator.messages import Origin, Verdict, judge, read_log

MIB, GIB = 1 << 20, 1 << 30


def one(text):
    (message,) = read_log([text]).messages
    return message


CASES: dict[str, tuple[str, dict, Verdict]] = {
    "XPU of 2.12, all free": (
        (
            "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity of 5.65 GiB of which"
            " 5.65 GiB is free. Of the allocated memory 195.50 KiB is allocated by PyTorch, and 1.81 MiB is reserved by PyTorch but"
            " unallocated. Please use `empty_cache` to release all unoccupied cached memory."
        ),
        {
            "kind": "xpu",
            "device": 0,
            "requested": 5003636900,
            "free": 6066641306,
            "allocated": 200192,
            "unallocated": 1897923,
        },
        Verdict.LIMIT,
    ),
    "XPU, single allocations": (
        (
            "RuntimeError: Current platform can NOT allocate memory block with size larger than 4GB! Tried to allocate 6.85 GiB"
            " (GPU  0; 15.56 GiB total capacity; 0 bytes already allocated; 0 bytes reserved in total by PyTorch)"
        ),
        {
            "kind": "xpu",
            "device": 0,
            "requested": 7355131494,
            "limit": 4 * GIB,
            "allocated": 0,
            "reserved": 0,
            "free": None,
        },
        Verdict.LIMIT,
    ),
    "MPS before GiB": (
        (
            "RuntimeError: MPS backend out of memory (MPS allocated: 5.56 GB, other allocations: 1.10 GB, max allowed: 6.80 GB)."
            " Tried to allocate 768.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"
        ),
        {"kind": "mps", "requested": 768 * MIB, "allocated": 5970004541, "other": 1181116006, "allowed": 7301444403},
        Verdict.LIMIT,
    ),
    "MPS of 1.13": (
        "MPS backend out of memory (MPS allocated: 18.02 GB, max allowed: 18.13 GB). Tried to allocate 256 bytes on shared pool.",
        {"requested": 256, "allocated": 19348827668, "other": None, "allowed": 19466939269},
        Verdict.UNKNOWN,
    ),
    "MPS, one buffer": (
        "RuntimeError: Invalid buffer size: 9.77 GB",
        {"kind": "mps", "requested": 10490457620, "allocated": None},
        Verdict.LIMIT,
    ),
    "NPU of 2.8": (
        (
            "torch.OutOfMemoryError: NPU out of memory. Tried to allocate 72.00 MiB (NPU 0; 61.27 GiB total capacity; 56.05 GiB"
            " already allocated; 56.05 GiB current active; 5.04 MiB free; 58.39 GiB reserved in total by PyTorch).If reserved"
        ),
        {"kind": "npu", "device": 0, "free": 5284823, "active": 60183229235, "reserved": 62695785103},
        Verdict.FRAGMENTATION,
    ),
    "an exabyte on an NPU": (
        "NPU out of memory. Tried to allocate more than 1EB memory",
        {"kind": "npu", "requested": None, "over_limit": True},
        Verdict.NOT_DEVICE_MEMORY,
    ),
    "cudaMallocAsync on one line": (
        (
            "OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory) Currently allocated : 12.20 GiB"
            " Requested : 1.88 GiB Device limit : 16.00 GiB Free (according to CUDA): 0 bytes PyTorch limit (set by user-supplied"
            " memory fraction) : 17179869184.00 GiB"
        ),
        {"origin": Origin.ASYNC, "device": 0, "requested": 2018634629, "total": 16 * GIB, "free": 0, "limit": None},
        Verdict.UNKNOWN,
    ),
    "cudaMallocAsync, far too much": (
        (
            "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated : 4.34 GiB\nRequested : 62.57 GiB\n"
            "Device limit : 23.99 GiB\nFree (according to CUDA): 8.81 GiB\nPyTorch limit (set by user-supplied memory fraction)\n"
            ": 17179869184.00 GiB"
        ),
        {"origin": Origin.ASYNC, "requested": 67184025928, "total": 25759066358, "free": 9459665469, "limit": None},
        Verdict.CAPACITY,
    ),
    "cudaMallocAsync with a fraction": (
        (
            "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated : 7.90 GiB\nRequested : 1.00 GiB\n"
            "Device limit : 23.99 GiB\nFree (according to CUDA): 15.00 GiB\nPyTorch limit (set by user-supplied memory fraction)\n"
            ": 8.00 GiB"
        ),
        {"requested": GIB, "limit": 8 * GIB},
        Verdict.LIMIT,
    ),
    "cudaMallocAsync, cut": (
        "torch.OutOfMemoryError: Allocation on device \n",
        {"origin": Origin.ASYNC, "device": None, "requested": None},
        Verdict.UNKNOWN,
    ),
    "refused by policy": (
        (
            "torch.OutOfMemoryError: CUDA out of memory. Allocation was preemptively rejected because it would exceed"
            " per_process_memory_fraction limit. Requested size: 20971520"
        ),
        {"origin": Origin.POLICY, "requested": 20 * MIB},
        Verdict.LIMIT,
    ),
    "refused by policy, with a unit": (
        (
            "CUDA out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction limit."
            " Requested size: 20.00 MiB"
        ),
        {"origin": Origin.POLICY, "requested": 20 * MIB},
        Verdict.LIMIT,
    ),
    "masked by NVML": (
        'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, please report a bug',
        {"origin": Origin.MASKED, "is_oom": True, "requested": None},
        Verdict.UNKNOWN,
    ),
    "masked by NVML, newer": (
        'NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":813',
        {"origin": Origin.MASKED, "is_oom": True},
        Verdict.UNKNOWN,
    ),
    "a broken expandable segment": (
        '!handles_.at(i) INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":420, please report a bug',
        {"origin": Origin.MASKED, "is_oom": True},
        Verdict.UNKNOWN,
    ),
    "the driver": (
        (
            "torch.AcceleratorError: CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/\n"
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
        ),
        {"origin": Origin.DRIVER, "is_oom": True, "requested": None},
        Verdict.UNKNOWN,
    ),
    "the driver, before 1.5": (
        "RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58",
        {"origin": Origin.DRIVER, "is_oom": True},
        Verdict.UNKNOWN,
    ),
    "a device-side assert": (
        "RuntimeError: CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        {"origin": Origin.ASSERT, "is_oom": False},
        Verdict.NOT_DEVICE_MEMORY,
    ),
    "cuBLAS": (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        {"origin": Origin.LIBRARY, "is_oom": True},
        Verdict.UNKNOWN,
    ),
    "host memory": (
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried to allocate"
            " 94371840 bytes."
        ),
        {"origin": Origin.HOST, "kind": "cpu", "requested": 94371840},
        Verdict.NOT_DEVICE_MEMORY,
    ),
    "an array in host memory": (
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 4.50 GiB for an array with shape (1, 2) and data type float32",
        {"origin": Origin.HOST, "requested": 4831838208},
        Verdict.NOT_DEVICE_MEMORY,
    ),
    "Slurm's killer": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step tasks have been OOM Killed.",
        {"origin": Origin.HOST},
        Verdict.NOT_DEVICE_MEMORY,
    ),
    "NCCL in two warnings": (
        (
            "node2:24881:25568 [2] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n\n"
            "node2:24881:25568 [2] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 10485760 bytes\n"
            "node2:24881:25568 [2] NCCL INFO transport/p2p.cc:204 -> 1"
        ),
        {"origin": Origin.NCCL, "device": 2, "worker": "node2:24881:25568", "requested": 10485760},
        Verdict.UNKNOWN,
    ),
    "NCCL without figures": (
        (
            "DistBackendError: NCCL error in: ../NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
        ),
        {"origin": Origin.NCCL, "line": 1, "requested": None},
        Verdict.UNKNOWN,
    ),
    "2.0 with a fraction": (
        (
            "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 1; 15.77 GiB total capacity; 7.50 GiB already allocated; 7.80 GiB free;"
            " 7.97 GiB allowed; 7.56 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting"
        ),
        {"device": 1, "requested": 2 * GIB, "allowed": 8557722337, "free": 8375186227, "reserved": 8117488189},
        Verdict.LIMIT,
    ),
    "less than nothing unallocated": (
        (
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 24.00 GiB of which 0 bytes is free. Of the"
            " allocated memory 23.01 GiB is allocated by PyTorch, and 17179869183.98 GiB is reserved by PyTorch but unallocated."
        ),
        {"unallocated": None, "allocated": 24706799370, "free": 0},
        Verdict.UNKNOWN,
    ),
    "only what was asked for": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 218.96 GiB\n",
        {"requested": 235106509783, "total": None},
        Verdict.UNKNOWN,
    ),
    "cut at 80 columns": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU",
        {"requested": 20 * MIB, "device": None},
        Verdict.UNKNOWN,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_read_and_judged(name):
    text, said, verdict = CASES[name]
    message = one(text)
    figures = {key: getattr(message, key) for key in said}
    assert {key: getattr(value, "bytes", value) for key, value in figures.items()} == said
    assert judge(message).verdict is verdict


@pytest.mark.parametrize(
    "text",
    [
        'if "CUDA out of memory" in str(e):',
        'raise RuntimeError("out of memory") from e',
        "except torch.cuda.OutOfMemoryError:",
        'File "/x/oom.py", line 3, in out_of_memory_handler',
        "| WARNING: ran out of memory, retrying batch",
        "GPU memory: 5.00 GiB free, 3.00 GiB reserved",
        "process 12 has 3.00 GiB",
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "tried to allocate the rooms again",
        "",
    ],
)
def test_talk_of_memory_is_no_message(text):
    assert read_log([f"{text}\n"]).messages == ()


@pytest.mark.parametrize(
    ("hint", "expandable", "advice"),
    [
        (
            (
                "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid"
                " fragmentation.  See documentation for Memory Management  (https://…)"
            ),
            False,
            "PYTORCH_ALLOC_CONF=expandable_segments:True",
        ),
        (
            (
                "If reserved but unallocated memory is large try setting max_split_size_mb to avoid fragmentation.  See documentation"
                " for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
            ),
            None,
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
        (" See documentation for Memory Management  (https://…)", True, "expandable segments are on already"),
        ("", None, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    ],
    ids=["2.9", "2.1", "2.14 with expandable segments on", "cut"],
)
def test_expandable_segments_are_advised_unless_they_are_on(hint, expandable, advice):
    message = one(
        "CUDA out of memory. Tried to allocate 524.00 MiB. GPU 0 has a total capacity of 23.77 GiB of which 137.12 MiB is free."
        " Including non-PyTorch memory, this process has 23.63 GiB memory in use. Of the allocated memory 20.81 GiB is allocated"
        " by PyTorch, and 2.43 GiB is reserved by PyTorch but unallocated. " + hint
    )
    judgement = judge(message)
    assert message.expandable is expandable
    assert judgement.verdict is Verdict.FRAGMENTATION
    assert judgement.advice[0].startswith(advice)
