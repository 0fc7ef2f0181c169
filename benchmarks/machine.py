"""On what machine, and how busy, figures were taken."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "scipy", "numba", "autograd", "torch")


def describe() -> dict[str, Any]:
    """CPU, cores, memory, load of the last minute, versions; None for what this system does not tell."""
    return {
        "cpu": _first_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory_gib() -> float | None:
    total = _first_value("/proc/meminfo", "MemTotal")
    return round(int(total.split()[0]) / 2**20, 1) if total else None


def _first_value(path: str, field: str) -> str | None:
    """Of a file of `field : value` lines."""
    file = Path(path)
    if not file.is_file():
        return None
    for line in file.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return None
