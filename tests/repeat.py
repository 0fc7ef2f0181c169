"""Runs tests again and again, on a machine that is as busy or as odd as you like, and counts who fails how often.

    python tests/repeat.py --times 10 --busy 2 tests/node/test_daemon.py -k signals
    python tests/repeat.py --times 3 --nohup            # all of `make test`
    python tests/repeat.py --times 20 --make tests/live # some of it: on all cores, then those that want to be alone

Everything that is not an option of this program goes to pytest, or with --make to `make test`; without any of that,
the whole of `make test` is run. Each run writes a log; the tally at the end says which tests failed, how often, and in
which logs. Exit code: 0 if all runs passed, else 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LATENESS = Path(__file__).resolve().with_name("lateness")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
NOT_HEARD = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""What nohup, and a shell for the background jobs of a script, have a command ignore."""
LAST_WORDS_S = 10.0
BUSY = """
import os, sys, time
parent, until_s = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while os.getppid() == parent and time.monotonic() < until_s:
    for _ in range(1_000_000):
        pass
"""
"""Ends with its parent, however that ends, and at the latest when the time is up."""


@contextmanager
def busy_loops(count: int, at_most_s: float) -> Iterator[None]:
    command = [sys.executable, "-c", BUSY, str(os.getpid()), str(at_most_s)]
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_once(command: list[str], log: Path, *, is_deaf: bool, late_s: float, limit_s: float) -> int | None:
    """The exit code; None: the time was up, and the command and all of its session were killed."""
    paths = [str(LATENESS), *filter(None, [os.environ.get("PYTHONPATH")])]
    late = {"LATE_S": f"{late_s:g}", "PYTHONPATH": os.pathsep.join(paths)} if late_s else {}

    def ignore() -> None:
        for number in NOT_HEARD:
            signal.signal(number, signal.SIG_IGN)

    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **late},
            preexec_fn=ignore if is_deaf else None,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM first: tests that started clusters get to end them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, metavar="N", help="how many runs (default: 10)")
    parser.add_argument("--busy", type=int, default=0, metavar="K", help="beside so many busy loops")
    parser.add_argument(
        "--late", type=float, default=0.0, metavar="S", help="delay processes, threads, logs and files by S seconds"
    )
    parser.add_argument("--nohup", action="store_true", help="with SIGHUP, SIGINT and SIGQUIT ignored")
    parser.add_argument("--make", action="store_true", help="run `make test` with what is selected")
    parser.add_argument("--limit-s", type=float, default=3600.0, metavar="S", help="of each run (default: 3600)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where logs go (default: a new folder in /tmp)")
    options, selection = parser.parse_known_args(arguments)
    selection = [word for word in selection if word != "--"]
    if options.times < 1 or options.busy < 0 or options.late < 0 or options.limit_s <= 0:
        parser.error("--times and --limit-s must be above 0, --busy and --late at least 0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and end what runs, as at Ctrl-C
    folder = options.logs or Path(tempfile.mkdtemp(prefix="pollux-repeat-"))
    folder.mkdir(parents=True, exist_ok=True)
    # Colours off: the names of those that failed are read from the output.
    words = ["-rfE", "--color=no", *selection]
    command = [sys.executable, "-m", "pytest", *words]
    if options.make or not selection:
        command = ["make", "test", "ARGS=" + shlex.join(words).replace("$", "$$")]

    passed, failures = 0, defaultdict[str, list[str]](list)
    for number in range(1, options.times + 1):
        log, began_s = folder / f"run-{number}.log", time.monotonic()
        with busy_loops(options.busy, options.limit_s + 3 * LAST_WORDS_S):
            code = run_once(command, log, is_deaf=options.nohup, late_s=options.late, limit_s=options.limit_s)
        how = "passed" if code == 0 else "time is up" if code is None else f"exit code {code}"
        print(f"run {number} of {options.times}: {how}, {time.monotonic() - began_s:.0f} s, {log}", flush=True)
        if code == 0:
            passed += 1
            continue
        names = set(FAILED.findall(log.read_text("utf-8", "replace")))
        for name in names or {f"({how}, and no test is named)"}:
            failures[name].append(log.name)

    print(f"{options.times} runs, {passed} passed, {options.times - passed} failed")
    for name, logs in sorted(failures.items(), key=lambda item: (-len(item[1]), item[0])):
        print(f"{len(logs):4} × {name}  [{', '.join(logs)}]")
    return 0 if passed == options.times else 1


if __name__ == "__main__":
    sys.exit(main())
