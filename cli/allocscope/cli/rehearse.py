"""`allocscope rehearse`: what the forecast and the alerts would have said over a recorded run."""

from __future__ import annotations

import argparse
import json
import re
import sys

from allocscope.alerts.rehearsal import SEED, Rehearsal, RehearsedAlert, rehearse
from allocscope.allocator.errors import AllocatorError
from allocscope.allocator.recording import Recording, read_recording

HELP = "what the forecast would have said over a recorded run"


def main(arguments: list[str]) -> int:
    """0: rehearsed; 2: the recording cannot be used."""
    asked = _parser().parse_args(arguments)
    try:
        recording = read_recording(asked.recording)
        rehearsal = rehearse(recording, seed=asked.seed)
    except AllocatorError as error:
        print(f"allocscope rehearse: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_json(rehearsal)) if asked.json else as_text(rehearsal, recording))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="allocscope rehearse",
        description=HELP,
        epilog="example: allocscope rehearse leak-1-3771.run.json",
        allow_abbrev=False,
    )
    parser.add_argument("recording", metavar="RUN.run.json", help="beside it lies the snapshot that it names")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object; times are the recording's unix microseconds"
    )
    parser.add_argument(
        "--seed", type=_seed, default=SEED, metavar="N", help=f"of the block maps' jitter (default: {SEED})"
    )
    return parser


def _seed(told: str) -> int:
    if re.fullmatch(r"-?\d{1,18}", told, re.ASCII) is None:
        raise argparse.ArgumentTypeError(f"{told!r} is not a whole number, such as {SEED}")
    return int(told)


def as_json(rehearsal: Rehearsal) -> dict[str, object]:
    """As INTERFACES.md has it."""
    return {
        "samples": rehearsal.samples,
        "oom_us": rehearsal.oom_us,
        "alerts": [
            {
                "name": alert.name,
                "severity": alert.severity.value,
                "cause": alert.cause.value if alert.cause else None,
                "at_us": alert.at_us,
                "resolved_us": alert.resolved_us,
                "summary": alert.summary,
            }
            for alert in rehearsal.alerts
        ],
    }


def as_text(rehearsal: Rehearsal, recording: Recording) -> str:
    """A line an alert, in seconds since the run's start."""
    end = "went on to its end" if rehearsal.oom_us is None else f"died at {_since(recording, rehearsal.oom_us)}"
    lines = [f"{recording.name}: {rehearsal.samples:,} samples; {end}"]
    lines += [_line(alert, recording) for alert in rehearsal.alerts]
    return "\n".join(lines if rehearsal.alerts else [*lines, "no alerts"])


def _line(alert: RehearsedAlert, recording: Recording) -> str:
    until = "the end" if alert.resolved_us is None else _since(recording, alert.resolved_us)
    return f"{_since(recording, alert.at_us):>7} – {until:<7}  {alert.severity.value:<8}  {alert.name}: {alert.summary}"


def _since(recording: Recording, time_us: int) -> str:
    return f"{(time_us - recording.start_us) / 1e6:.0f} s"
