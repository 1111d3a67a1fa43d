"""A job that is another process than the test, and another user's where asked for: as a class for tests, and as that process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from allocscope.model import AllocatorRef, Process
from allocscope.model.sample import chunks
from allocscope.model.wire import chunk_to_wire, process_to_wire
from allocscope.probe.call import Call, CallBroken
from allocscope.proto.v1.probe_service_pb2 import AttachRequest, AttachResponse
from tests.daemon.fakes import process, sample
from tests.needs import REPO

ATTACH = "/allocscope.proto.v1.ProbeService/Attach"


class Stranger:
    """Says hello, and sends samples; what it is answered can be read line by line."""

    def __init__(
        self,
        path: Path,
        process_id: str,
        *,
        pid: int | None = None,
        uid: int | None = None,
        samples: int = 1,
        within: Sequence[str] = (),
    ) -> None:
        """`pid`: what it says of itself, where that is not so; `within`: a command that runs its own."""
        told = {"path": os.fspath(path), "process_id": process_id, "pid": pid, "uid": uid, "samples": samples}
        told["started_us"] = time.time_ns() // 1000
        command = [*within, sys.executable, "-m", "tests.daemon.stranger", json.dumps(told)]
        self.process = subprocess.Popen(
            command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid
        self.hello = hello({**told, "pid": pid or self.pid})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def answer(self) -> dict:
        """The next one: refused (a list) and acknowledged, or broken; or closed, where it could not connect."""
        assert self.process.stdout
        assert self.process.stderr
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        words: dict = json.loads(line)
        return words

    def wait_acknowledged(self, sequence: int) -> None:
        """Until the daemon has everything up to this number."""
        while self.answer()["acknowledged"] < sequence:
            pass

    def kill(self) -> None:
        """As kill -9."""
        self.process.kill()
        self.process.communicate()


def hello(told: dict) -> Process:
    """As its probe would say it."""
    known = {name: told[name] for name in ("process_id", "pid", "started_us")}
    return process(host=socket.gethostname(), **known)


def main(told: dict) -> None:
    """The process."""
    if told["uid"] is not None:
        os.setgroups([])
        os.setgid(told["uid"])
        os.setuid(told["uid"])
    mine = hello({**told, "pid": told["pid"] or os.getpid()})
    call = Call(ATTACH)
    call.send(AttachRequest(sent_us=1, hello=process_to_wire(mine)).SerializeToString())
    figures = [sample(sequence + 1) for sequence in range(told["samples"])]
    for chunk in chunks(AllocatorRef(mine.process_id, "GPU-1"), figures):
        call.send(AttachRequest(sent_us=1, samples=chunk_to_wire(chunk)).SerializeToString())
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.connect(told["path"])
        except OSError as error:
            say(closed=error.strerror)
            return
        while not call.is_over:
            line.sendall(call.outgoing)
            call.outgoing.clear()
            data = line.recv(1 << 16)
            if not data:
                break
            for answer in call.receive(data):
                response = AttachResponse.FromString(answer)
                say(refused=list(response.refused), acknowledged=response.acknowledged_sequence)
    say(broken="it hung up")


def say(**words) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except CallBroken as broken:
        say(broken=str(broken))
