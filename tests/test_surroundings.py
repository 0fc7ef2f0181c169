"""The surroundings that `conftest.py` gives to all tests, whatever those that it was started in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
INNER = """
import os, signal, subprocess

def test_children_hear_everything():
    said = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
    sets = dict(line.split(":") for line in said.splitlines() if line.startswith("Sig"))
    of_libc = 3 << 31  # its own 32 and 33: what started us may ignore them, and no program can change that
    found = {name: int(sets[name], 16) & ~of_libc for name in ("SigBlk", "SigIgn")}
    assert found == {"SigBlk": 0, "SigIgn": 0}

def test_ctrl_c_is_heard():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.sigtimedwait((), 1)  # anything that lets it arrive
    except KeyboardInterrupt:
        return
    raise AssertionError("it was not")

def test_a_hangup_is_survived_by_those_who_were_told_so():
    os.kill(os.getpid(), signal.SIGHUP)
"""
LEAKY = """
import subprocess

class Ring:
    pass

def test_leaves_a_process():
    ring = Ring()
    ring.me, ring.process = ring, subprocess.Popen(["sleep", "0"], stdin=subprocess.PIPE)

def test_leaves_nothing():
    pass
"""
LEAKY_TOGETHER = """
import subprocess
import pytest

class Ring:
    pass

@pytest.fixture(scope="module")
def shared():
    ring = Ring()
    ring.me, ring.process = ring, subprocess.Popen(["sleep", "0"], stdin=subprocess.PIPE)
    yield ring

def test_one(shared):
    pass

def test_two(shared):
    pass
"""
DEAF = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def pytest_in(folder: Path, source: str, *arguments: str, start: tuple[str, ...] = ()) -> str:
    """What a session of its own says, with a copy of our conftest."""
    (folder / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (folder / "test_it.py").write_text(source)
    options = ("-p", "no:cacheprovider", "-W", "error", "--color=no", "-rA", "--rootdir", str(folder))
    command = [sys.executable, *start, "-m", "pytest", *options, *arguments, str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "workers"])
def test_signals_that_were_ignored_or_blocked_are_heard_again(tmp_path: Path, workers: tuple[str, ...]) -> None:
    said = pytest_in(tmp_path, INNER, *workers, start=("-c", DEAF))
    assert "3 passed" in said, said


def test_who_leaves_a_process_behind_is_told_so_and_nobody_else(tmp_path: Path) -> None:
    said = pytest_in(tmp_path, LEAKY)
    assert "ERROR test_it.py::test_leaves_a_process" in said, said
    assert "ResourceWarning" in said
    assert "PASSED test_it.py::test_leaves_nothing" in said


def test_a_file_that_leaves_a_process_behind_is_told_so_at_its_end(tmp_path: Path) -> None:
    said = pytest_in(tmp_path, LEAKY_TOGETHER)
    assert "ERROR test_it.py::test_two" in said, said
    assert "ResourceWarning" in said


def test_machine_code_is_made_once_before_the_first_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By commands that stand in for those that take a minute."""
    pytest.importorskip("numba")
    package = tmp_path / "package" / "pollux"
    (package / "cli").mkdir(parents=True)
    for path in (package / "__init__.py", package / "cli" / "__init__.py"):
        path.touch()
    (package / "kernel.py").write_text("from pollux.goodput.compiled import compiled\n")
    (package / "cli" / "main.py").write_text(
        "import os, sys\n"
        "assert os.environ['POLLUX_CACHE'] == ''\n"
        f"print(sys.argv[1], file=open({str(tmp_path / 'made')!r}, 'a'))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "package"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    for _ in range(2):
        said = pytest_in(tmp_path, "def test_it():\n    pass\n", "-n", "2")
        assert "1 passed" in said, said
    made = (tmp_path / "made").read_text().split()
    assert made == ["simulate", "simulate", "bench"]
    assert os.path.exists(package / "__pycache__" / "machine-code.stamp")
    (package / "kernel.py").write_text("from pollux.goodput.compiled import compiled, lean\n")
    said = pytest_in(tmp_path, "def test_it():\n    pass\n")
    assert "Making machine code" in said, said
    assert len((tmp_path / "made").read_text().split()) == 6
