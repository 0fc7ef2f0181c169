"""Qhull is the same however it is loaded, and in nobody's way."""

from __future__ import annotations

import subprocess
import sys

import pytest

ALONE = """
import sys
from pollux.simulator.qhull import load_qhull
qhull = load_qhull()
assert "scipy.spatial" not in sys.modules
assert "scipy.linalg" not in sys.modules
points = [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]
mesh = qhull.Delaunay(points)
assert load_qhull() is qhull
"""
THEN_ALL = """
import scipy.spatial
import scipy.linalg
assert scipy.spatial.Delaunay is qhull.Delaunay
assert scipy.linalg.inv([[2.0]]) == 0.5
assert (scipy.spatial.Delaunay(points).simplices == mesh.simplices).all()
"""
AFTER_ALL = """
import scipy.spatial
from pollux.simulator.qhull import load_qhull
assert load_qhull().Delaunay is scipy.spatial.Delaunay
"""
BUILT_OTHERWISE = """
import pollux.simulator.qhull as door
door.EXTENSION = "scipy.spatial._nothing"
found = door.load_qhull()
assert found.__name__ == "scipy.spatial"
assert issubclass(found.QhullError, RuntimeError)
assert found.Delaunay([[0, 0], [0, 1], [1, 0]]).simplices.shape == (1, 3)
"""


@pytest.mark.parametrize("script", [ALONE, ALONE + THEN_ALL, AFTER_ALL, BUILT_OTHERWISE])
def test_it_is_scipys(script: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
