"""manifest.json: what a checkpoint says about itself, so that damage to it or to any of its files is found."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux import __version__
from pollux.errors import CheckpointError

FORMAT = "pollux-checkpoint"
VERSION = 1


class UnusableError(CheckpointError):
    """Whole for all we know, but not to be read by this process: a newer format, no permission, an unlike torch."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a file of a checkpoint must be like."""

    size: int
    """In bytes."""
    sha256: str

    def verify(self, path: Path) -> None:
        """Reads every byte, unless the size is wrong already. Raises `CheckpointError` with what is wrong."""
        with told(path), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            sha256 = hashlib.file_digest(file, "sha256").hexdigest() if size == self.size else ""
        if size != self.size:
            raise CheckpointError(str(path), f"has {size} bytes instead of {self.size}", "Use another checkpoint")
        if sha256 != self.sha256:
            raise CheckpointError(str(path), f"SHA-256 is {sha256} instead of {self.sha256}", "Use another checkpoint")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    created: str
    """ISO 8601, UTC."""
    facts: dict[str, Any]
    files: dict[str, FileFacts]
    """By name, which is that of the part with `.pt`."""
    pollux: str
    torch: str

    def document(self) -> bytes:
        """The JSON of it, with its own checksum. Raises `CheckpointError` if the facts are no JSON."""
        content = _as_json({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)})
        return json.dumps({**content, "sha256": _checksum(content)}, indent=1).encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises `CheckpointError` if the file is damaged, `UnusableError` if it is none of this version."""
        with told(path):
            document = path.read_bytes()
        try:
            content = json.loads(document)
            kind, version = content["format"], content["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(str(path), f"unreadable: {error!r}", "Use another checkpoint") from error
        if kind != FORMAT or version != VERSION:
            problem = f"format {kind!r}, version {version!r}; this Pollux ({__version__}) reads {FORMAT!r} {VERSION}"
            raise UnusableError(str(path), problem, "Use the Pollux version that wrote it")
        expected = content.pop("sha256", None)
        if _checksum(content) != expected:
            raise CheckpointError(str(path), "its content does not match its checksum", "Use another checkpoint")
        files = {name: FileFacts(**facts) for name, facts in content["files"].items()}
        return cls(**{field.name: content[field.name] for field in dataclasses.fields(cls)} | {"files": files})


def _as_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content as a reader will see it, who must come to the same checksum: keys are text, tuples are lists."""
    try:
        document: dict[str, Any] = json.loads(json.dumps(content, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError("facts", f"not JSON: {error}", "Give finite numbers, text, lists and dicts") from error
    return document


def _checksum(content: Mapping[str, Any]) -> str:
    document = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(document.encode()).hexdigest()


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """A file that is not there is damage; one that cannot be read may be whole."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(str(path), "missing", "Use another checkpoint") from error
    except OSError as error:
        raise UnusableError(
            str(path), f"cannot be read: {error.strerror}", "Check permissions and file system"
        ) from error
