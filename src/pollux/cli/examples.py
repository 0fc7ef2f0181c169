"""Where the example scripts are, which several commands run."""

from __future__ import annotations

from pathlib import Path

import pollux
from pollux.errors import Permanent

FIRST = "demo.yaml"
"""By which their folder is known."""


def examples_folder() -> Path:
    """In the package if it was installed as a wheel, else in the checkout."""
    package = Path(pollux.__file__).parent
    for folder in (package / "examples", package.parents[1] / "examples"):
        if (folder / FIRST).is_file():
            return folder
    raise Permanent(f"The examples are neither in {package} nor beside it. Install Pollux anew, or use a checkout.")
