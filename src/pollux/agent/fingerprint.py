"""What kind of job this is, as one word: the same for the same script, model and optimizer, in any process.

Jobs of one kind are expected to behave alike on the same GPUs, so that one may learn from the measurements of another.
Arguments, data and hyper-parameters do not count.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

DIGITS = 12
MAX_NAME = 32
"""Letters of the model's class that are kept, for people."""


def fingerprint(model: nn.Module, optimizer: Optimizer, script: Path | None) -> str:
    """Such as `resnet-ab12cd34ef56`: from names, shapes and types of the parameters, never from their values."""
    digest = hashlib.sha256()
    digest.update(_content(script))
    digest.update(f"\0{type(optimizer).__name__}\n".encode())
    for name, parameter in model.named_parameters():
        shape = "unknown" if is_lazy(parameter) else tuple(parameter.shape)
        digest.update(f"{name}\0{shape}\0{parameter.dtype}\n".encode("utf-8", "surrogatepass"))
    name = re.sub(r"[^a-z0-9]", "", type(model).__name__.lower())[:MAX_NAME]
    return f"{name or 'model'}-{digest.hexdigest()[:DIGITS]}"


def main_script() -> Path | None:
    """The file that this process runs; None in an interactive session."""
    found = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if found is None else Path(found)


def _content(script: Path | None) -> bytes:
    try:
        return b"" if script is None else script.read_bytes()
    except OSError:  # moved away since it was started
        return b""
