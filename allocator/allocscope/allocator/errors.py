"""What can be wrong with what this package is given.

AllocatorError
├── SnapshotError              what should be a PyTorch snapshot
│   ├── CutOffError            ends too early
│   ├── TooLargeError          unpacks to more than the reader allows
│   ├── HostilePickleError     asks for more than plain values
│   └── NotASnapshotError      is something else
├── RecordingError             RUN.run.json, what a recording says beside its snapshot
├── SettingsError              a PYTORCH_CUDA_ALLOC_CONF string
└── TraceError                 a history that contradicts itself, or begins in the middle
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
        self.conf = conf


class TraceError(AllocatorError):
    """A history that contradicts itself, or begins in the middle of a run."""

    def __init__(self, entry: int, problem: str) -> None:
        super().__init__(f"trace entry {entry}: {problem}")
        self.entry = entry
        """Which, from 0."""
