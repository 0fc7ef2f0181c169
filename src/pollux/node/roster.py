"""What this node has of each job, and the file that lets the next daemon find it: replicas.json."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from pollux.core import JobId, from_json, to_json
from pollux.node.folder import NodeFiles, write
from pollux.node.hosted import Hosted, Record
from pollux.node.processes import is_running

log = logging.getLogger(__name__)

MAX_ENDED = 100
"""How many replicas of a job are listed after their end."""


@dataclass(frozen=True, slots=True)
class StoreHere:
    """The process of a job's rendezvous store."""

    pid: int
    began: int
    port: int

    @property
    def is_running(self) -> bool:
        return is_running(self.pid, self.began)


@dataclass(frozen=True, slots=True)
class _Saved:
    replicas: tuple[Record, ...]
    store: StoreHere | None = None
    newest: int = 0


class Roster:
    """Replicas and stores by job. `save` after each change that the next daemon has to know."""

    def __init__(self, folder: NodeFiles) -> None:
        self._folder = folder
        self._jobs: dict[JobId, dict[str, Hosted]] = {}
        self.stores: dict[JobId, StoreHere] = {}
        self._newest: dict[JobId, int] = {}
        self._unsaved: set[JobId] = set()

    def load(self, job: JobId) -> list[Hosted]:
        """What the daemon before knew. `InvalidDocument` if the file is damaged."""
        try:
            saved = from_json(self._folder.replicas_file(job).read_bytes(), _Saved)
        except FileNotFoundError:
            return []
        if saved.store is not None:
            self.stores[job] = saved.store
        self.note(job, max([saved.newest, *(one.generation for one in saved.replicas)]))
        for one in saved.replicas:
            hosted = Hosted(
                job,
                one.replica,
                one.generation,
                (one.slot, *one.more_slots),
                self._folder.replica_log(job, one.replica),
                time.monotonic(),
                one.is_plain,
                one.pid,
                one.began,
                one.has_spoken,
                has_finished=one.has_finished,
                is_leaving=one.is_leaving,
                is_forgotten=one.is_forgotten,
            )
            if one.exit_code is not None:
                hosted.note_end(one.exit_code)
            elif one.has_unknown_end:
                hosted.note_unknown_end(may_have_finished=one.may_have_finished)
            self.add(hosted)
        return self.of(job)

    def save(self, job: JobId) -> None:
        """What is here goes on also if that cannot be written."""
        path = self._folder.replicas_file(job)
        saved = _Saved(tuple(hosted.record for hosted in self.of(job)), self.stores.get(job), self.newest(job))
        try:
            if saved.replicas or saved.store is not None:
                write(path, to_json(saved))  # not durable: if the machine goes down, so do the replicas
            else:
                path.unlink(missing_ok=True)
            self._unsaved.discard(job)
        except OSError as error:
            self._unsaved.add(job)
            log.error("What job %s has here cannot be saved, and the next daemon may not find it: %s", job, error)

    def save_again(self) -> None:
        """What could not be written before, if there is room now."""
        for job in list(self._unsaved):
            self.save(job)

    def newest(self, job: JobId) -> int:
        """The highest generation of the job that anything was started for here, since it was last forgotten."""
        return self._newest.get(job, 0)

    def note(self, job: JobId, generation: int) -> None:
        self._newest[job] = max(generation, self.newest(job))

    def add(self, hosted: Hosted) -> None:
        here = self._jobs.setdefault(hosted.job, {})
        here[hosted.replica] = hosted
        for old in [one.replica for one in here.values() if not one.is_alive][:-MAX_ENDED]:
            del here[old]

    def remove(self, hosted: Hosted) -> None:
        here = self._jobs[hosted.job]
        del here[hosted.replica]
        if not here:
            del self._jobs[hosted.job]

    def drop_store(self, job: JobId) -> None:
        """Nothing new is to come: what is still listed are replicas that end."""
        self.stores.pop(job, None)
        self._newest.pop(job, None)

    def drop(self, job: JobId) -> None:
        """Forget the job, on disk as well."""
        self._jobs.pop(job, None)
        self.drop_store(job)
        self.save(job)

    def of(self, job: JobId) -> list[Hosted]:
        return list(self._jobs.get(job, {}).values())

    def find(self, job: JobId, replica: str) -> Hosted | None:
        return self._jobs.get(job, {}).get(replica)

    def alive(self) -> list[Hosted]:
        return [hosted for here in self._jobs.values() for hosted in here.values() if hosted.is_alive]

    def free_slots(self, num_slots: int) -> Iterator[int]:
        """The lowest ones first; beyond the last slot if need be, for whoever gives out GPUs knows better."""
        taken = {slot for hosted in self.alive() if not hosted.is_forgotten for slot in hosted.slots}
        for slot in (slot for slot in count() if slot not in taken):
            if slot >= num_slots:
                log.warning("All %d slots of this node are taken; a replica gets number %d.", num_slots, slot)
            yield slot
