"""The built-in applications: one JSON file each, made by `pollux profile fit --write`.

A name may say how long a training run is: `cifar10:0.2` is one a fifth as long as the catalogue's.
"""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from pollux.applications.application import Application
from pollux.core import codec
from pollux.errors import InvalidSpec, UnknownName

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """Names of the built-in applications, sorted."""
    files = _folder().iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


@lru_cache(maxsize=64)
def load(name: str) -> Application:
    """One built-in application, of the length that its name says."""
    name, is_given, length = name.partition(":")
    if name not in names():
        raise UnknownName("application", name, names())
    if is_given:
        return load(name).of_length(_share(name, length))
    return from_text(_folder().joinpath(f"{name}.json").read_text(encoding="utf-8"))


def _folder() -> Traversable:
    from importlib import resources  # slow, and runs on measured traces need none of it

    return resources.files("pollux.applications")


def _share(name: str, length: str) -> float:
    try:
        share = float(length)
    except ValueError:
        share = math.nan
    if not 0.0 < share < math.inf:
        problem = "says no length, which is a number above 0"
        raise InvalidSpec("application", f"{name}:{length}", problem, f"Give {name}, or for instance {name}:0.2")
    return share


def to_text(application: Application) -> str:
    """JSON that people can read and diff; floats to six digits, which is more than any of them is known to."""
    text = json.dumps(_rounded(codec.encode(application)), indent=2, ensure_ascii=False)
    one_line = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text)
    return one_line + "\n"


def from_text(text: str) -> Application:
    """The application that `to_text` wrote; raises InvalidDocument for anything else."""
    return codec.from_json(text, Application)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
