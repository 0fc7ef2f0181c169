"""Looks at all that a job can see, and writes it down as JSON: into the file PROBE_OUT.

As a script it is a plain command; `probing_train.py` has a replica look. PROBE_PATHS: a file with paths, one a line,
that it tries to read, as somebody would who knows how a cluster's folder is laid out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress

MOST_BYTES = 4 << 20


def read(path: str) -> str | None:
    """None: it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.read(descriptor, MOST_BYTES).decode("latin-1")
    except OSError:
        return None
    finally:
        os.close(descriptor)


def readable(paths: Iterable[str]) -> dict[str, str]:
    return {path: text for path in paths if (text := read(path)) is not None}


def named_by_pollux() -> Iterator[str]:
    """Every file that a POLLUX_ variable names, and those in a folder that one names."""
    for name, value in os.environ.items():
        path = value.removeprefix("unix:")
        if name.startswith("POLLUX_") and path.startswith("/"):
            yield from (os.path.join(path, each) for each in os.listdir(path)) if os.path.isdir(path) else (path,)


def of_processes() -> Iterator[str]:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        yield from (f"/proc/{pid}/{file}" for file in ("environ", "cmdline"))
        with suppress(OSError):
            yield from (f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd") if int(number) > 2)


def look() -> None:
    seen = {
        "uid": os.getuid(),
        "groups": os.getgroups(),
        "environment": dict(os.environ),
        "arguments": sys.argv,
        "initial_environment": read("/proc/self/environ"),
        "command_line": read("/proc/self/cmdline"),
        "named": readable(named_by_pollux()),
    }
    if listed := os.environ.get("PROBE_PATHS"):
        seen["tried"] = readable((read(listed) or "").splitlines())
        seen["processes"] = readable(of_processes())
        seen["memory"] = readable(f"/proc/{pid}/mem" for pid in os.listdir("/proc") if pid.isdecimal())
    taken = getattr(sys.modules.get("pollux.agent.environment"), "_taken", {})
    seen["credentials"] = dict(taken)
    out = os.environ["PROBE_OUT"]
    with open(f"{out}.new", "w", encoding="utf-8") as file:
        json.dump(seen, file)
    os.replace(f"{out}.new", out)


if __name__ == "__main__":
    look()
