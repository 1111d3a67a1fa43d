"""A stand-in for torch in a process of its own: no CUDA, but what the probe looks at, and knobs for a test's script."""

from . import _C, cuda, version

__version__ = "2.14.1+fake"
__all__ = ["_C", "cuda", "version"]
