"""What code a job runs, as one word: replicas may only join each other if it is the same.

Counted are the script and the modules below its folder that it imports, directly or through one another, wherever in
a file the import stands. Not seen: modules by computed names, installed packages, data.
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from pollux.errors import InvalidSpec
from pollux.wire.nodes import Launch

MAX_FILES = 10_000
"""A script in a folder with more than that is a mistake; the rest of it does not count."""


def fingerprint(launch: Launch) -> str:
    """64 hexadecimal digits; nothing of a plain command, which nobody joins.

    Reads files; those that have not changed since the last call are not read again.
    """
    if launch.is_plain:
        return ""
    script = Path(os.path.realpath(launch.script))
    root = script.parent
    seen = {script: _digest(script)}
    if seen[script] is None:
        raise InvalidSpec("script", launch.script, "cannot be read", "Give the absolute path of a Python file")
    waiting = [script]
    while waiting and len(seen) < MAX_FILES:
        path = waiting.pop()
        package = path.relative_to(root).parent.parts
        for name in _imports(path, package):
            for file in _files(root, name):
                if file not in seen:
                    seen[file] = _digest(file)
                    waiting.append(file)
    total = hashlib.sha256()
    for path in sorted(seen):
        total.update(f"{path.relative_to(root)}\0{seen[path]}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def _files(root: Path, name: tuple[str, ...]) -> Iterator[Path]:
    """The files below the folder that `import a.b.c` runs: of the packages a and a.b, and of the module."""
    folder = root
    for part in name:
        for file in (folder / part / "__init__.py", folder / f"{part}.py"):
            if file.is_file():
                yield file
                break
        folder = folder / part
        if not folder.is_dir():
            return


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(path: Path) -> str | None:
    """None: cannot be read."""
    return _read(path, _state(path))[0]


def _imports(path: Path, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Dotted names, as tuples; `from a import b` gives a.b, which may be a module or not."""
    for level, name in _read(path, _state(path))[1]:
        if level == 0:
            yield name
        elif level <= len(package) + 1:
            yield (*package[: len(package) - level + 1], *name)


@lru_cache(maxsize=MAX_FILES)
def _read(path: Path, state: object) -> tuple[str | None, tuple[tuple[int, tuple[str, ...]], ...]]:
    """Digest and imports (level, name) of a file that is in this state."""
    try:
        source = path.read_bytes()
    except OSError:
        return None, ()
    found: list[tuple[int, tuple[str, ...]]] = []
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.Module([], [])  # python will say what is wrong with it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = tuple(node.module.split(".")) if node.module else ()
            found += [(node.level, (*base, alias.name)) for alias in node.names]
    return hashlib.sha256(source).hexdigest(), tuple(dict.fromkeys(found))
