"""Runs one `allocscope` process of a test: it ends with the test, and its clock may be off.

python launch.py SECONDS COMMAND…
"""

import ctypes
import sys
import time

from allocscope.cli.app import main

PR_SET_PDEATHSIG, SIGKILL = 1, 9

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    off_ns, true_ns = round(float(sys.argv[1]) * 1e9), time.time_ns
    if off_ns:
        time.time_ns = lambda: true_ns() + off_ns
    sys.exit(main(sys.argv[2:]))
