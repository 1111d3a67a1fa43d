"""How much memory a job may still take: the machine's, and what each of its control groups leaves it."""

from pathlib import Path

import pytest

from allocscope.probe.host_memory import anonymous_bytes, available_bytes

KIB, MIB = 1 << 10, 1 << 20
MEMINFO = "MemTotal:        9000 kB\nMemFree:          100 kB\nMemAvailable:    8192 kB\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, None, id="nothing is known"),
        pytest.param({"proc/meminfo": MEMINFO}, 8 * MIB, id="the machine alone"),
        pytest.param(
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": f"{MIB}\n",
                "sys/fs/cgroup/a/memory.max": f"{4 * MIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{3 * MIB}\n",
                "sys/fs/cgroup/a/memory.stat": f"active_file 7\ninactive_file {MIB}\n",
            },
            2 * MIB,
            id="a group further up is limited, and files can be dropped",
        ),
        pytest.param(
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{4 * MIB}\n",
                "sys/fs/cgroup/memory.current": f"{3 * MIB}\n",
            },
            MIB,
            id="in a container",
        ),
        pytest.param(
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "12:cpu:/x\n4:memory:/x\n0::/\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{2 * MIB}\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{3 * MIB}\n",
            },
            0,
            id="version 1, and over its limit",
        ),
        pytest.param(
            {"proc/meminfo": MEMINFO, "proc/self/cgroup": "garbage\n0::/../../etc\n\n"}, 8 * MIB, id="a path that leads out"
        ),
    ],
)  # fmt: skip
def test_the_least_of_what_is_left(tmp_path, files, expected):
    assert available_bytes(machine(tmp_path, files)) == expected


def test_what_the_process_holds(tmp_path):
    files = {"proc/self/status": "VmRSS:\t 900 kB\nRssAnon:\t     512 kB\nRssFile:\t 388 kB\n"}
    assert anonymous_bytes(machine(tmp_path, files)) == 512 * KIB
    assert anonymous_bytes(tmp_path / "none") is None


def test_this_machine_tells_both():
    available, held = available_bytes(), anonymous_bytes()
    assert available is not None
    assert held is not None
    assert held > MIB
