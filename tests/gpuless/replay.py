"""A case of truth (tests/allocator/truth/README.md), asked of the real allocator. A script of the rig's Python: CASE, to stdout as JSON."""

import gzip
import json
import sys
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports] (only the rig's Python has it)


def streams_of(requests):
    """The streams that are asked for by their numbers, made in this order: free blocks go by it."""
    numbers = {request[-1] for request in requests if request[0] in "ar"}
    made = [torch.cuda.Stream() for _ in range(max(numbers))]
    return dict(enumerate([torch.cuda.default_stream(), *made]))


class Replay:
    """The requests of one case, one after the other."""

    def __init__(self, case):
        self.case = case
        self.streams = streams_of(case["requests"])
        self.held = {}
        self.marks = []
        self.oom = None

    def number_of(self, pointer):
        return next((number for number, stream in self.streams.items() if stream.cuda_stream == pointer), pointer)

    def ask(self, what, *rest):
        if what == "a":
            name, size, number = rest
            with torch.cuda.stream(self.streams[number]):
                self.held[name] = torch.empty(size, dtype=torch.uint8, device="cuda")
        elif what == "f":
            del self.held[rest[0]]
        elif what == "r":
            self.held[rest[0]].record_stream(self.streams[rest[1]])
        elif what == "s":
            torch.cuda.synchronize()
        else:
            torch.cuda.empty_cache()

    def run(self):
        marked = {done for done, _ in self.case["expect"]["marks"]}
        for done, request in enumerate(self.case["requests"], 1):
            try:
                self.ask(*request)
            except torch.OutOfMemoryError as error:
                self.oom = {"at": done - 1, "message": str(error)}
                break
            if done in marked:
                self.marks.append([done, torch.cuda.memory_stats()])

    def told(self):
        stats, snapshot = torch.cuda.memory_stats(), torch.cuda.memory._snapshot()
        return {
            "trace": [self.entry(entry) for entry in snapshot["device_traces"][0]],
            "segments": [self.segment(segment) for segment in snapshot["segments"]],
            "stats": stats,
            "marks": self.marks,
            "oom": self.oom,
            "device_free_end": torch.cuda.mem_get_info()[0],
        }

    def entry(self, entry):
        where = entry["device_free"] if entry["action"] == "oom" else entry["addr"]
        return [entry["action"], where, entry["size"], self.number_of(entry["stream"])]

    def segment(self, segment):
        blocks = [[b["address"], b["size"], b["requested_size"], b["state"]] for b in segment["blocks"]]
        return [
            segment["address"], segment["total_size"], self.number_of(segment["stream"]), segment["segment_type"], blocks,
        ]  # fmt: skip


def main(path):
    case = json.loads(gzip.decompress(Path(path).read_bytes()))
    if case["memory_fraction"]:
        torch.cuda.set_per_process_memory_fraction(case["memory_fraction"])
    torch.cuda.memory._record_memory_history(context=None, max_entries=10_000_000, clear_history=True)
    replay = Replay(case)
    replay.run()
    json.dump(replay.told(), sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
