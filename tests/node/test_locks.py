"""Locks on files: one holds them, many may look, and the kernel knows who it is."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from pollux.node.folder import is_locked
from pollux.node.locks import hold, holder, is_held, is_stopped

HOLD = """
import sys
from pathlib import Path
from pollux.node.locks import hold
assert hold(Path(sys.argv[1])) is not None
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


@pytest.fixture
def other(path):
    """A process that holds the lock."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_one_holds_it_and_is_known(path, other):
    assert is_locked(path)
    assert holder(path) == other.pid
    assert hold(path, patience_s=0.0) is None


def test_nobody_holds_it_after_the_end_however_it_came(path, other):
    other.kill()
    other.wait()
    assert holder(path) is None
    lock = hold(path)
    assert holder(path) == os.getpid()
    os.close(lock)


def test_a_file_that_is_not_there_is_held_by_nobody(path):
    assert holder(path) is None
    assert not is_locked(path)


def test_one_that_was_removed_keeps_nobody_out(path):
    lock = hold(path)
    assert is_held(lock, path)
    path.unlink()
    assert not is_held(lock, path)
    path.touch()
    assert not is_held(lock, path)
    assert holder(path) is None
    os.close(lock)


def test_those_who_only_look_turn_nobody_away(path):
    path.touch()
    is_over = threading.Event()

    def look():
        while not is_over.is_set():
            is_locked(path)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for _ in range(200):
            lock = hold(path, patience_s=30.0)
            assert lock is not None
            os.close(lock)
    finally:
        is_over.set()
        watcher.join()


def test_a_stopped_process_is_told_apart(other):
    assert not is_stopped(other.pid)
    other.send_signal(signal.SIGSTOP)
    os.waitpid(other.pid, os.WUNTRACED)
    assert is_stopped(other.pid)
    other.send_signal(signal.SIGCONT)
    assert not is_stopped(0)
