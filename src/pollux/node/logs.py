"""The logs of replicas on this node, part by part: also of jobs that ended long ago, and until they are too old."""

from __future__ import annotations

import codecs
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from pollux.core import JobId, NodeId
from pollux.errors import Permanent
from pollux.node.folder import StateFolder
from pollux.wire.messages import MAX_MESSAGE_BYTES
from pollux.wire.nodes import LogHere, LogPart, LogsHere, ReadLog

log = logging.getLogger(__name__)

MAX_PART_BYTES = 2**20
MIN_PART_BYTES = 4
"""The longest letter: each part has at least one, so that whoever reads on gets to the end."""


def list_logs(folder: StateFolder, job: JobId, running: Collection[str]) -> LogsHere:
    """`running`: the replicas of the job that live here."""
    logs = []
    for replica, path in folder.replica_logs(job).items():
        with suppress(FileNotFoundError):  # removed a moment ago
            state = path.stat()
            logs.append(LogHere(replica, state.st_size, replica in running, state.st_mtime))
    return LogsHere(tuple(logs))


def read_log(folder: StateFolder, node: NodeId, asked: ReadLog, *, is_running: bool) -> LogPart:
    """What was asked for, up to a mebibyte of it; a letter that is being written comes with the next part.

    `Permanent` if there is no such log, `InvalidSpec` if there cannot be one.
    """
    path = folder.replica_log(asked.job, asked.replica)
    try:
        with path.open("rb") as file:
            return _part(file, asked.offset, asked.limit, is_final=not is_running)
    except FileNotFoundError:
        if is_running:
            return LogPart("", 0)  # it is just being started
        raise Permanent(f"Replica {asked.replica} of job {asked.job} has no log on node {node}.") from None


def remove_old(folder: StateFolder, before_s: float, is_wanted: Callable[[JobId], bool]) -> Iterator[JobId]:
    """Remove all of the jobs that have written nothing here since then, unless they are wanted."""
    for job in folder.jobs():
        if not is_wanted(job) and _touched_at_s(folder.job(job)) < before_s:
            shutil.rmtree(folder.job(job), ignore_errors=True)
            log.info("Job %s ended long ago: its logs are removed.", job)
            yield job


def _part(file: BinaryIO, offset: int, limit: int, *, is_final: bool) -> LogPart:
    size = file.seek(0, os.SEEK_END)
    start = min(size, offset) if offset >= 0 else max(0, size + offset)
    start += _rest_of_letter(file, start)
    limit = max(MIN_PART_BYTES, min(limit, MAX_PART_BYTES))
    while True:
        file.seek(start)
        raw = file.read(limit)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(raw, final=is_final and start + len(raw) >= size)
        if len(json.dumps(text)) <= MAX_MESSAGE_BYTES // 2:
            return LogPart(text, start + len(raw) - len(decoder.getstate()[0]))
        limit //= 2  # what is no text takes up to six times its size in a message


def _rest_of_letter(file: BinaryIO, start: int) -> int:
    """How many bytes from here belong to a letter that begins before."""
    begin = max(0, start - 3)
    file.seek(begin)
    raw = file.read(start - begin + 3)
    at = start - begin
    for first in range(at):
        for stop in range(at + 1, min(first + 4, len(raw)) + 1):
            with suppress(UnicodeDecodeError):
                if len(raw[first:stop].decode()) == 1:
                    return stop - at
    return 0


def _touched_at_s(folder: Path) -> float:
    """When one of its files was last written. That something was removed from it does not count."""
    newest = 0.0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                newest = max(newest, os.stat(os.path.join(place, name)).st_mtime)
    return newest
