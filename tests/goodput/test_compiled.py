"""The door to numba: opened by the first call, from whichever thread, for functions that call one another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pollux
from pollux.goodput.compiled import lean
from pollux.goodput.levels_kernel import sync_seconds

FIRST_CALLS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
from pollux.goodput import levels_kernel as kernel
from pollux.goodput.levels_kernel import cheapest, cheapest_of_classes, sync_seconds

assert "numba" not in sys.modules
together = Barrier(3)
theta, ones = np.array([0.1] * 6 + [1.0]), np.ones(1)
whole = np.array([0]), np.array([1])

def call(ask):
    together.wait()
    return ask()

with ThreadPoolExecutor(3) as pool:
    found = list(pool.map(call, [
        lambda: float(cheapest_of_classes(theta[None], ones, 8 * ones, ones, *whole, ones, ones, ones)[0][0, 0]),
        lambda: cheapest(theta, 8.0, 1, ones, ones, ones, 0.0, 1.0)[1],
        lambda: sync_seconds(theta, 8.0, 1),
    ]))
assert "numba" in sys.modules
assert kernel.sync_seconds is not sync_seconds and hasattr(kernel.sync_seconds, "signatures")
print(*(round(value, 9) for value in found))

from numba.np.linalg import ensure_blas
ensure_blas()  # what numba multiplies matrices with is there …
assert "scipy.linalg" not in sys.modules  # … but not its package: half of the time of a first call
"""


def test_first_calls_from_several_threads_load_numba_and_agree():
    pytest.importorskip("numba")
    source = str(Path(pollux.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, env={"PYTHONPATH": source}
    )
    assert done.returncode == 0, done.stderr
    # s·T_grad + T_grad + T_sync with T_grad = 0.1 + 0.1 and T_sync = 0.1 + 0.1·6
    assert done.stdout.split() == ["1.1", "1.1", "0.7"]


def test_lean_functions_neither_keep_nor_lose_what_they_are_handed():
    theta = np.array([0.1] * 6 + [1.0])
    before = sys.getrefcount(theta)
    found = {round(sync_seconds(theta, 8.0, 1), 9) for _ in range(100)}
    assert found == {0.7}
    assert sys.getrefcount(theta) == before


def test_a_lean_function_that_makes_an_array_is_refused():
    numba = pytest.importorskip("numba")

    @lean
    def made(length):
        return np.zeros(length)

    with pytest.raises(numba.core.errors.NumbaError, match=r"NRT required|No implementation"):
        made(3)


CALLER = """
from pollux.goodput.compiled import compiled
from called import FACTOR, doubled

@compiled
def asked(x):
    return FACTOR * doubled(x)
"""
CALLED = """
from pollux.goodput.compiled import compiled

FACTOR = {factor}

@compiled
def doubled(x):
    return 2 * x + {more}
"""


def test_machine_code_on_disk_is_dropped_when_what_it_calls_or_reads_has_changed(tmp_path):
    pytest.importorskip("numba")
    (tmp_path / "caller.py").write_text(CALLER)
    source = f"{Path(pollux.__file__).parents[1]}:{tmp_path}"
    ask = "import caller; print(caller.asked(10), sum(caller.asked.stats.cache_hits.values()))"
    found = []
    for factor, more in ((1, 0), (1, 0), (3, 1)):
        (tmp_path / "called.py").write_text(CALLED.format(factor=factor, more=more))
        env = {"PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found == [["20", "0"], ["20", "1"], ["63", "0"]]
