"""Loading one compiled module of a package without the package, whose other parts may take longer than all our work."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec


def load_alone(extension: str) -> bool:
    """Load `package.extension` under its own name, so that whoever imports it or the package later finds it.

    False, and nothing has changed, if it or its package is there already or is built otherwise.
    """
    package, _, _ = extension.rpartition(".")
    if package in sys.modules or extension in sys.modules:
        return False
    try:
        found = find_spec(package)
        spec = PathFinder.find_spec(extension, found.submodule_search_locations) if found is not None else None
        if spec is None or spec.loader is None:
            return False
        module = sys.modules[extension] = module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, AttributeError):
        sys.modules.pop(extension, None)
        return False
    return True
