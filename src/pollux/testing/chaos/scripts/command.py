"""A plain command that says in a file of its own what it really does: `command.py --witness DIR …`.

It needs nothing but Python, so that it starts within a moment. Each run writes `DIR/<pid>-<ns>.jsonl`: that it has
started, that it lives, which children it has left behind, and, as its very last act, how it is going to end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--witness", type=Path, required=True)
parser.add_argument("--seconds", type=float, default=3.0, help="how long it works; less if DIR/finish is there")
parser.add_argument("--code", type=int, default=0, help="its exit code")
parser.add_argument("--signal", type=int, default=0, help="it ends itself by this signal instead")
parser.add_argument("--children", type=int, default=0, help="leave so many behind, every other one in its own session")
parser.add_argument("--until-told", action="store_true", help="work until DIR/finish is there")
BEAT_S = 0.2


def write(what: str, **more: object) -> None:
    print(json.dumps({"what": what, "at": time.time(), **more}), file=records, flush=True)


def began(pid: int) -> int:
    """As `pollux.node.processes.began_at`; this program imports nothing of Pollux."""
    return int(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19])


given = parser.parse_args()
given.witness.mkdir(parents=True, exist_ok=True)
records = (given.witness / f"{os.getpid()}-{time.time_ns()}.jsonl").open("a")
write("started", pid=os.getpid(), began=began(os.getpid()))
for number in range(given.children):
    child = subprocess.Popen(["sleep", "7200"], start_new_session=bool(number % 2))
    write("child", pid=child.pid, began=began(child.pid))
    child.returncode = 0  # nobody here waits for it
until_s = time.monotonic() + given.seconds
while given.until_told or time.monotonic() < until_s:
    if (given.witness / "finish").exists():
        break
    time.sleep(BEAT_S)
    write("beat")
if given.signal:
    write("finished", code=-given.signal)
    signal.signal(given.signal, signal.SIG_DFL) if given.signal != signal.SIGKILL else None
    os.kill(os.getpid(), given.signal)
write("finished", code=given.code)
sys.stdout.flush()
os._exit(given.code)
