"""PyTorch's real CUDA caching allocator on a machine without a GPU.

The CUDA build of PyTorch runs as it is; what answers it is a stand-in for the CUDA runtime, the driver, NVML and cuBLAS
(`native/`), which keeps account of pretend devices. `install` has the PyTorch, `build` the stand-ins, `rig` what a test uses;
README.md says what this can show, and what it cannot.

Not its business: what Allocscope does with what it sees.
"""
