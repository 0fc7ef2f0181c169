"""The GPUs of this machine, found without any library: which there are, of what type, and which one a slot is."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

NO_GPU = "cpu"
"""The type of slots that are mere CPU time."""
UNKNOWN_GPU = "gpu"
"""The type of GPUs that their driver says nothing about."""
INFORMATION = Path("/proc/driver/nvidia/gpus")
_MAKERS = {"nvidia", "tesla"}


def visible_devices(environment: Mapping[str, str]) -> list[str]:
    """The CUDA devices that a process with this environment may use, as CUDA_VISIBLE_DEVICES names them."""
    present = [name.removeprefix("nvidia") for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if not present or listed is None:
        return sorted(present, key=int)
    names = [name.strip() for name in listed.split(",")]
    return names[: next((at for at, name in enumerate(names) if not name or name.startswith("-")), len(names))]


def gpu_type(devices: Sequence[str], information: Path = INFORMATION) -> str:
    """What the driver calls these GPUs, as one word: `t4`, `a100-sxm4-40gb`. The most frequent one if they differ."""
    if not devices:
        return NO_GPU
    models = Counter(model for path in sorted(information.glob("*/information")) if (model := _model(path)))
    return models.most_common(1)[0][0] if models else UNKNOWN_GPU


def devices_of(slots: Sequence[int], devices: Sequence[str]) -> str:
    """What CUDA_VISIBLE_DEVICES says to a process that holds these slots. Slots beyond the last GPU share them."""
    return ",".join(dict.fromkeys(devices[slot % len(devices)] for slot in slots))


def _model(path: Path) -> str:
    try:
        found = re.search(r"^Model:(.*)$", path.read_text("utf-8", "replace"), re.MULTILINE)
    except OSError:
        return ""
    words = re.findall(r"[a-z0-9]+", found[1].lower()) if found else []
    return "-".join(word for word in words if word not in _MAKERS)
