"""torch's modules as the probe finds them in sys.modules, held in a test's hand: which version, which build, which memory."""

from types import SimpleNamespace

GIB = 1 << 30
FAMILIES = (
    "allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes",
    "allocation", "active", "segment", "inactive_split",
)  # fmt: skip
SINCE_2_0 = ("num_alloc_retries", "num_ooms")
SINCE_2_3 = ("num_sync_all_streams", "num_device_alloc", "num_device_free")


def runtime_of(modules):
    """The CUDA runtime under a FakeTorch, for `torch_cuda.loaded_runtime`."""
    return modules["torch.cuda"].runtime


def stats(version: tuple[int, int] = (2, 14), figures: dict[str, int] | None = None) -> dict:
    """Nested statistics of that version; `allocated_bytes` is its current figure, a scalar counter its value."""
    figures = figures or {}
    nested: dict = {}
    for family in FAMILIES:
        now = figures.get(family, 0)
        of_all = {"current": now, "peak": now + 1 if now else 0, "allocated": now + 2, "freed": 2}
        nested[family] = {"all": of_all, "small_pool": of_all, "large_pool": of_all}
    for counter in SINCE_2_0 + (SINCE_2_3 if version >= (2, 3) else ()):
        nested[counter] = figures.get(counter, 0)
    if version >= (2, 13):
        nested["reserved_bytes_by_private_pools"] = {}
    return nested


class FakeTorch:
    """A torch with CUDA; a test changes what it will."""

    def __init__(self, version: tuple[int, int] = (2, 14), devices: int = 1) -> None:
        self.version = version
        self.is_initialized = True
        self.backend = "native"
        self.conf = ""
        self.fractions = [1.0] * devices
        self.figures: list[dict[str, int]] = [{"reserved_bytes": 1}] + [{} for _ in range(devices - 1)]
        self.segments: list[dict] = []
        self.memory_info = (70 * GIB, 80 * GIB)
        self.is_caching = True
        self.contexts: set[int] = set()
        self.history: dict | None = None
        """What the history was switched on with; None: it is off."""
        self.host_traces: list[dict] = []
        self.traces: list[list[dict]] = [[] for _ in range(devices)]
        self.fails: dict[str, Exception] = {}
        self.calls: list[str] = []
        self.observers: list = []
        self.on_call = lambda name: None
        self.uuids: list[object] = [f"{index}" * 8 for index in range(devices)]
        self.modules = self._modules()

    def _modules(self) -> dict[str, SimpleNamespace]:
        torch = SimpleNamespace(__version__=".".join(map(str, self.version)) + ".0")
        binding = SimpleNamespace(_cuda_memoryStats=self._stats)
        binding._cuda_getAllocatorBackend = lambda: self._called("backend", self.backend)
        binding._cuda_attach_out_of_memory_observer = self._attach
        if self.version >= (2, 10):
            binding._accelerator_getAllocatorSettings = lambda: self._called("conf", self.conf)
        cuda = SimpleNamespace(
            is_initialized=lambda: self._called("is_initialized", self.is_initialized),
            device_count=lambda: self._called("device_count", len(self.figures)),
            runtime=SimpleNamespace(memory_info=lambda index: self._called(f"memory_info({index})", self.memory_info)),
            get_device_properties=self._properties,
            memory_snapshot=self._snapshot_with_traces if self.version >= (2, 11) else self._snapshot,
        )
        if self.version >= (2, 1):
            binding._cuda_isHistoryEnabled = lambda: self._called("is_enabled", self.history is not None)
        if self.version >= (2, 12):
            binding._cuda_cudaCachingAllocator_is_enabled = lambda: self._called("is_caching", self.is_caching)
        binding._cuda_hasPrimaryContext = lambda index: self._called(f"context({index})", index in self.contexts)
        binding._cuda_memorySnapshot = self._raw_snapshot
        binding._cuda_record_memory_history = self._switch
        binding._cuda_record_memory_history_legacy = self._switch
        memory = SimpleNamespace(
            _snapshot=lambda: self._raw_snapshot(None), _record_memory_history=self._recorder(binding)
        )
        if self.version >= (2, 9):
            memory.get_per_process_memory_fraction = lambda index: self._called("fraction", self.fractions[index])
        return {
            "torch": torch, "torch._C": binding, "torch.cuda": cuda, "torch.cuda.memory": memory,
            "torch.version": SimpleNamespace(cuda="13.0"),
        }  # fmt: skip

    def _called(self, name, answer):
        self.calls.append(name)
        self.on_call(name)
        if name in self.fails:
            raise self.fails[name]
        return answer

    def _stats(self, index):
        if self.backend == "pluggable":
            raise RuntimeError("the pluggable allocator does not yet support getDeviceStats")
        return self._called(f"stats({index})", stats(self.version, self.figures[index]))

    def _attach(self, observer):
        self._called("observer", None)
        self.observers.append(observer)

    def _recorder(self, binding):
        """The function of that version, which calls what torch._C has by then."""

        def since_2_14(
            enabled="all", context="all", stacks="all", max_entries=2**63 - 1, device=None, clear_history=False,
            record_pinned_host_memory=False,
        ):  # fmt: skip
            binding._cuda_record_memory_history(enabled, context, stacks, max_entries, clear_history)

        def since_2_5(
            enabled="all", context="all", stacks="all", max_entries=2**63 - 1, device=None, clear_history=False
        ):
            binding._cuda_record_memory_history(enabled, context, stacks, max_entries, clear_history)

        def since_2_1(enabled="all", context="all", stacks="all", max_entries=2**63 - 1, device=None):
            binding._cuda_record_memory_history(enabled, context, stacks, max_entries)

        def of_2_0(
            enabled, record_context=True, trace_alloc_max_entries=1, trace_alloc_record_context=False, device=None
        ):
            binding._cuda_record_memory_history_legacy(enabled, record_context, trace_alloc_max_entries)

        if self.version >= (2, 14):
            return since_2_14
        return since_2_5 if self.version >= (2, 5) else since_2_1 if self.version >= (2, 1) else of_2_0

    def _switch(self, enabled, *how):
        self._called("switch", None)
        self.history = {"enabled": enabled, "how": how} if enabled else None

    def _raw_snapshot(self, how):
        quiet = how is not None and not how[2]
        traces = [[] for _ in self.traces] if quiet else [list(trace) for trace in self.traces]
        name = "whole snapshot without traces" if quiet else "whole snapshot"
        told = {"segments": list(self.segments), "device_traces": traces, "allocator_settings": {}}
        return self._called(name, {**told, **({"host_traces": self.host_traces} if self.host_traces else {})})

    def _snapshot(self):
        return self._called("snapshot", self.segments)

    def _snapshot_with_traces(self, mempool_id=None, include_traces=True):
        return self._called("snapshot with traces" if include_traces else "snapshot", self.segments)

    def _properties(self, index):
        properties = SimpleNamespace(name="Fake H200", total_memory=80 * GIB)
        if self.version >= (2, 4):
            properties.uuid = self.uuids[index]
        return self._called("properties", properties)


def segment(device: int = 0, *blocks: tuple[int, int, str], **more) -> dict:
    """A segment of small blocks (size, requested, state)."""
    return {
        "device": device, "address": 0, "total_size": sum(size for size, _, _ in blocks), "stream": 0,
        "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False,
        "blocks": [{"size": size, "requested_size": requested, "state": state} for size, requested, state in blocks],
        **more,
    }  # fmt: skip
