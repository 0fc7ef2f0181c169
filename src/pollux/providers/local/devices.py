"""Which CUDA devices there are, and why there are none where some are expected. No library is loaded for that."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pollux.core import checks
from pollux.errors import InvalidSpec

NVIDIA = "0x10de"
DISPLAY = "0x03"
"""How the class of a PCI device begins that shows or computes pictures."""
USE_CPU = "or set CUDA_VISIBLE_DEVICES= (empty) to use CPU slots without this message"


@dataclass(frozen=True, slots=True)
class DeviceReport:
    devices: list[str]
    """Those that can be used, as CUDA_VISIBLE_DEVICES names them; none: the machine offers CPU slots."""
    problem: str = ""
    """A sentence on GPUs that cannot be used, and what to do; empty: all is well."""


def describe_devices(environment: Mapping[str, str] | None = None, root: Path = Path("/")) -> DeviceReport:
    """What a process with this environment, by default ours, can use. `root`: holds dev, proc and sys."""
    listed = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    wanted = None if listed is None else _names(listed)
    if wanted == []:
        return DeviceReport([])  # somebody wants no GPU
    files = sorted(path.name for path in _entries(root / "dev") if re.fullmatch(r"nvidia(\d+|ctl)", path.name))
    if files and not (root / "proc/driver/nvidia/version").exists():
        return DeviceReport(
            [],
            f"/dev/{files[0]} is there, but the NVIDIA driver is not loaded (no /proc/driver/nvidia/version). Load it "
            "with `modprobe nvidia`, or install the driver for the kernel that runs, until `nvidia-smi` lists the "
            f"GPUs; {USE_CPU}.",
        )
    # CUDA counts the devices that it sees from 0, whatever numbers their files have, as in a container with some.
    present = [str(number) for number in range(sum(name != "nvidiactl" for name in files))]
    if not present and (cards := _cards(root)):
        return DeviceReport(
            [],
            f"There is an NVIDIA GPU ({cards[0]} on the PCI bus), but no driver for it. Install the NVIDIA driver, and "
            "in a container pass the GPUs in (docker run --gpus all), until `nvidia-smi` lists them; "
            f"{USE_CPU}.",
        )
    if wanted is None:
        return DeviceReport(present)
    return _among(wanted, present, listed or "")


def slots_of_each(nodes: int, slots: int | None, devices: Sequence[str]) -> int:
    """What each of so many nodes offers; `InvalidSpec` if the machine has less than was asked for."""
    checks.whole(InvalidSpec, "nodes", nodes, 1)
    checks.whole(InvalidSpec, "slots", slots, 1, optional=True)
    if not devices:
        return slots or max(1, _cores() // nodes)
    if len(devices) < nodes:
        fix = "Use fewer nodes, or set CUDA_VISIBLE_DEVICES= (empty) to use CPU slots"
        raise InvalidSpec("nodes", nodes, f"more than the {len(devices)} GPUs that they share", fix)
    if slots is not None and slots * nodes > len(devices):
        fix = "Use fewer, or none to share all of them, or set CUDA_VISIBLE_DEVICES= (empty) to use CPU slots"
        raise InvalidSpec("slots", slots, f"{nodes} × {slots} are more than the {len(devices)} GPUs here", fix)
    return slots or len(devices) // nodes


def _names(listed: str) -> list[str]:
    """Up to the first that is none: that is how CUDA reads it."""
    names = [name.strip() for name in listed.split(",")]
    return names[: _first(names, lambda name: not name or name.startswith("-"))]


def _among(wanted: list[str], present: list[str], listed: str) -> DeviceReport:
    """Names such as GPU-8f6d… are for the driver to check: they stay as they are."""

    def is_missing(name: str) -> bool:
        return not present or (name.isdecimal() and str(int(name)) not in present)

    usable = wanted[: _first(wanted, is_missing)]
    if len(usable) == len(wanted):
        return DeviceReport(usable)
    missing = wanted[len(usable)]
    here = f"the devices here are {', '.join(present)}" if present else "there is no GPU here"
    ignored = ", and CUDA ignores it with all that follow" if usable else ""
    fix = "Name only these, or unset it" if present else "Unset it"
    return DeviceReport(
        usable, f"CUDA_VISIBLE_DEVICES={listed} names device {missing}, but {here}{ignored}. {fix}; {USE_CPU}."
    )


def _cards(root: Path) -> list[str]:
    return sorted(
        card.name
        for card in _entries(root / "sys/bus/pci/devices")
        if _text(card / "vendor") == NVIDIA and _text(card / "class").startswith(DISPLAY)
    )


def _first(names: Iterable[str], is_so: Callable[[str], bool]) -> int | None:
    return next((at for at, name in enumerate(names) if is_so(name)), None)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip().lower()
    except OSError:
        return ""


def _cores() -> int:
    affinity: Callable[[int], Iterable[int]] | None = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(set(affinity(0))) if affinity else os.cpu_count() or 1
