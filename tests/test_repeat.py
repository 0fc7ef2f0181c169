"""`tests/repeat.py`: what it counts, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("repeat.py")
ODD = """
import signal
from pathlib import Path

def test_always():
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_{hup}

def test_now_and_then():
    runs = Path(__file__).with_name("runs")
    runs.write_text(runs.read_text() + "." if runs.exists() else ".")
    assert len(runs.read_text()) != 2, "the second time is bad luck"
"""


def repeat(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--logs", folder / "logs", *arguments]
    plain = ("-p", "no:cacheprovider", "--rootdir", folder, folder / "test_odd.py")
    return subprocess.run([str(word) for word in (*command, *plain)], capture_output=True, text=True)


def processes_of(pid: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"\0{pid}\0".encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def test_those_that_fail_now_and_then_are_counted_with_their_logs(tmp_path: Path) -> None:
    (tmp_path / "test_odd.py").write_text(ODD.format(hup="DFL"))
    done = repeat(tmp_path, "--times", 3)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "3 runs, 2 passed, 1 failed" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("   1 × ")
    assert last.endswith("test_odd.py::test_now_and_then  [run-2.log]")
    assert "bad luck" in (tmp_path / "logs" / "run-2.log").read_text()


def test_with_signals_ignored_and_busy_loops_that_end(tmp_path: Path) -> None:
    (tmp_path / "test_odd.py").write_text(ODD.format(hup="IGN"))
    script = (
        "import os, runpy, sys; print(os.getpid(), flush=True); sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", script, SCRIPT, "--logs", tmp_path / "logs", "--times", 1, "--busy", 2, "--nohup"]
    command += ["-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path / "test_odd.py"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 runs, 1 passed, 0 failed" in done.stdout
    assert processes_of(done.stdout.split()[0]) == []


def test_a_run_that_does_not_end_is_ended(tmp_path: Path) -> None:
    (tmp_path / "test_odd.py").write_text("import time\n\ndef test_for_ever():\n    time.sleep(1000)\n")
    done = repeat(tmp_path, "--times", 1, "--limit-s", 0.1)
    assert done.returncode == 1
    assert "time is up" in done.stdout


def test_whoever_ends_it_ends_what_it_runs(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "test_odd.py").write_text(
        "import os, time\nfrom pathlib import Path\n\ndef test_for_ever():\n"
        f"    Path({str(tmp_path / 'new')!r}).write_text(str(os.getpid()))\n"
        f"    os.rename({str(tmp_path / 'new')!r}, {str(begun)!r})\n    time.sleep(1000)\n"
    )
    command = [sys.executable, SCRIPT, "--logs", tmp_path / "logs", "--times", "1", tmp_path / "test_odd.py"]
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + 60
        while not begun.exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "-rfE --color=no"),
        (("--make", "tests/node", "-k", "not slow$"), "-rfE --color=no tests/node -k 'not slow$$'"),
    ],
)
def test_make_runs_all_tests_or_those_that_are_selected(
    tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    """By a program that stands in for it, and says how it was called."""
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    make.chmod(0o700)
    command = [sys.executable, SCRIPT, "--logs", tmp_path / "logs", "--times", "1", *arguments]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([str(word) for word in command], env={**os.environ, "PATH": path}, check=True, capture_output=True)
    assert (tmp_path / "logs" / "run-1.log").read_text() == f"<test><ARGS={expected}>"


LATE = """
import os, subprocess, sys, threading

def test_it():
    ask = "import sitecustomize, os; print(sitecustomize.LATE_S, os.replace.__name__)"
    told = subprocess.run([sys.executable, "-P", "-c", ask], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["0.01", "act_late"]
    done = []
    thread = threading.Thread(target=done.append, args=(1,))
    thread.start()
    thread.join()
    assert done == [1]
"""


def test_what_happens_beside_a_test_can_be_late(tmp_path: Path) -> None:
    (tmp_path / "test_odd.py").write_text(LATE)
    done = repeat(tmp_path, "--times", 1, "--late", 0.01)
    assert done.returncode == 0, (tmp_path / "logs" / "run-1.log").read_text()


@pytest.mark.parametrize("wrong", [("--times", 0), ("--busy", -1), ("--late", -1), ("--limit-s", 0)])
def test_senseless_numbers_are_refused(tmp_path: Path, wrong: tuple[object, ...]) -> None:
    done = repeat(tmp_path, *wrong)
    assert done.returncode == 2
    assert os.listdir(tmp_path) == []
