"""What can be wrong with what this package is given.

AllocatorError
├── SnapshotError              what should be a PyTorch snapshot
│   ├── CutOffError            ends too early
│   ├── TooLargeError          unpacks to more than the reader allows
│   ├── HostilePickleError     asks for more than plain values
│   └── NotASnapshotError      is something else
├── RecordingError             RUN.run.json, what a recording says beside its snapshot
├── SettingsError              a PYTORCH_CUDA_ALLOC_CONF string
├── TraceError                 a history that contradicts itself, or begins in the middle
├── ReplayError                requests written down that cannot be replayed
├── UndefinedStateError        a simulation has come to where the real allocator is corrupt
└── OutOfMemoryError           a simulated request that cannot be served
"""


class AllocatorError(Exception):
    """Anything below; its message is one line for people."""


class SnapshotError(AllocatorError):
    """What should be a PyTorch snapshot cannot be read as one."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name


class CutOffError(SnapshotError):
    """It ends too early."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, f"cut off: {problem}; copy or record it again")


class TooLargeError(SnapshotError):
    """It unpacks to more than the reader allows."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        super().__init__(name, f"unpacks to more than {limit_bytes} bytes, the limit for a snapshot")
        self.limit_bytes = limit_bytes


class HostilePickleError(SnapshotError):
    """It asks for more than plain values; nothing of it was run."""

    def __init__(self, name: str, wanted: str) -> None:
        super().__init__(
            name, f"its pickle asks for {wanted}, but a snapshot holds plain values only; nothing of it was run"
        )
        self.wanted = wanted


class NotASnapshotError(SnapshotError):
    """It is something else."""


class RecordingError(AllocatorError):
    """RUN.run.json is missing or says something that cannot be."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name


class SettingsError(AllocatorError):
    """A PYTORCH_CUDA_ALLOC_CONF string that PyTorch would refuse too."""

    def __init__(self, conf: str, problem: str) -> None:
        super().__init__(f"allocator settings {conf!r}: {problem}")
        self.conf, self.problem = conf, problem


class TraceError(AllocatorError):
    """A history that contradicts itself, or begins in the middle of a run."""

    def __init__(self, entry: int, problem: str) -> None:
        super().__init__(f"trace entry {entry}: {problem}")
        self.entry = entry
        """Which, from 0."""


class UndefinedStateError(AllocatorError):
    """The real allocator would be corrupt or abort here (ALLOCATOR.md 2.7, 5.4); what it would do next is not defined."""


class OutOfMemoryError(AllocatorError):
    """What torch.OutOfMemoryError is in a simulation; its message is PyTorch's own."""

    def __init__(self, message: str, *, requested_bytes: int, segment_bytes: int, rejected: bool = False) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.segment_bytes = segment_bytes
        """What was asked of the device; what the text calls "tried to allocate"."""
        self.rejected = rejected
        """By throw_on_cudamalloc_oom, before anything was tried."""


class ReplayError(AllocatorError):
    """Requests that cannot be replayed: not in the form that is known, or about allocations that there are not."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name
