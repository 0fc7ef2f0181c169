"""The door to numba: opened by the first call, from whichever thread, for functions that call one another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pollux

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
