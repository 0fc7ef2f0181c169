"""The door to SciPy's Qhull.

It is all that simulations need of SciPy, and the rest of `scipy.spatial` takes longer to import than many a run: 0.35 s
of CPU, of which 0.13 s are saved here. Where SciPy is built otherwise, all of it is imported.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType

PACKAGE = "scipy.spatial"
EXTENSION = "scipy.spatial._qhull"


def load_qhull() -> ModuleType:
    """The module with `Delaunay` and `QhullError`."""
    if PACKAGE not in sys.modules and EXTENSION not in sys.modules:
        try:
            _load_alone()
        except (ImportError, AttributeError):
            sys.modules.pop(EXTENSION, None)
    return sys.modules.get(EXTENSION) or importlib.import_module(PACKAGE)


def _load_alone() -> None:
    """Import the extension without its package, under its own name: a later import of the package finds it."""
    package = find_spec(PACKAGE)
    spec = PathFinder.find_spec(EXTENSION, package.submodule_search_locations) if package is not None else None
    if spec is None or spec.loader is None:
        raise ImportError(EXTENSION)
    module = module_from_spec(spec)
    sys.modules[EXTENSION] = module
    spec.loader.exec_module(module)
