"""The door to SciPy's Qhull.

It is all that simulations need of SciPy, and the rest of `scipy.spatial` takes longer to import than many a run: 0.35 s
of CPU, of which 0.32 s are saved here. Where SciPy is built otherwise, all of it is imported.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from pollux.goodput.lone_extension import load_alone

PACKAGE = "scipy.spatial"
EXTENSION = "scipy.spatial._qhull"
NEEDED = "scipy.linalg.cython_lapack"
"""What the extension is linked to, of a package that is as dear; its searches call it, but not with our transforms."""


def load_qhull() -> ModuleType:
    """The module with `Delaunay` and `QhullError`."""
    if PACKAGE not in sys.modules:
        load_alone(NEEDED)
    load_alone(EXTENSION)
    return sys.modules.get(EXTENSION) or importlib.import_module(PACKAGE)
