"""What castor knows of jobs from others of their kind: times on GPUs that a job has not run on, and how it begins.

All that jobs of a kind have measured, ended or not, makes one model for each GPU type (`goodput.pooled`). A job of that
kind is planned for by it, with a scale of its own; one that differs from its kind by its own fit, like one of no kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pollux.core import FrozenMap, Job, JobId, KindProfile, Observation, ObservationKey, Snapshot, kind_of
from pollux.goodput import PAPER, UNKNOWN_GRADIENT, BatchOptions, GoodputModel
from pollux.goodput.numerics import FloatArray
from pollux.goodput.pooled import Corrected, Kind, foreseen, scale_of, with_usual_length
from pollux.policies.pollux.moment import Moment
from pollux.policies.pollux.roster import Fits

OF_NO_KIND = -1


class Kinds:
    """What jobs have measured, by their kind. Each snapshot is filled in, then read; rosters have the models."""

    def __init__(self) -> None:
        self._ended: FrozenMap[str, KindProfile] = FrozenMap()
        self._foreseen: dict[JobId, tuple[KindProfile, Job, Job]] = {}
        self._on: dict[str, OnType] = {}
        self._number: dict[str, int] = {}  # of each kind that some job is of, or was
        self._next_number = 0
        self._told = b"", b""  # rows and versions of the jobs of the last round
        self._version: FloatArray = np.full(0, -1)  # by row: at which its job was last read
        self._kind: FloatArray = np.full(0, OF_NO_KIND)  # by row: number of the kind

    def on(self, gpu_type: str) -> OnType:
        if gpu_type not in self._on:
            self._on[gpu_type] = OnType(gpu_type, self)
        return self._on[gpu_type]

    @property
    def of_row(self) -> FloatArray:
        """The number of the kind of each job, by row; as long as there are rows, or longer."""
        return self._kind

    def filled_in(self, snapshot: Snapshot) -> Snapshot:
        """With what is foreseen for jobs that have not reported yet, and the usual length for those that say nothing of
        theirs, if jobs of their kind have ended."""
        if not snapshot.kinds:
            return snapshot
        before, self._foreseen = self._foreseen, {}
        for job_id, job in snapshot.jobs.items():
            says_all = job.model is not None and job.model.progress is not None and job.model.progress.total is not None
            if says_all or (profile := snapshot.kinds.get(kind_of(job) or "")) is None:
                continue
            known = before.get(job_id)
            if known is None or known[0] is not profile or known[1] is not job:
                model = (
                    foreseen(profile, job.spec.limits) if job.model is None else with_usual_length(job.model, profile)
                )
                known = profile, job, replace(job, model=model)
            self._foreseen[job_id] = known
        if not self._foreseen:
            return snapshot
        jobs = {**snapshot.jobs, **{job_id: job for job_id, (_, _, job) in self._foreseen.items()}}
        return replace(snapshot, jobs=FrozenMap(jobs))

    def read(self, moment: Moment) -> None:
        """Take in what is new: of jobs that have ended, and of those whose fits have changed."""
        ended, rows = moment.snapshot.kinds, moment.row
        before, self._told = self._told, (rows.tobytes(), moment.version.tobytes())
        if ended is self._ended and before == self._told:
            return
        if ended is not self._ended:
            for kind, profile in ended.items():
                if self._ended.get(kind) is not profile:
                    self._note(kind, profile.profile.observations)
            self._ended = ended
        missing = int(rows.max(initial=-1)) + 1 - len(self._version)
        if missing > 0:
            self._version = np.concatenate([self._version, np.full(2 * missing, -1)])
            self._kind = np.concatenate([self._kind, np.full(2 * missing, OF_NO_KIND)])
        jobs = moment.jobs
        for position in (self._version[rows] != moment.version).nonzero()[0].tolist():
            name = kind_of(jobs[position])
            number = OF_NO_KIND if name is None else self._note(name, jobs[position].profile.observations)
            self._kind[rows[position]] = number
        self._version[rows] = moment.version
        self._forget(set(self._kind[rows].tolist()))

    def _note(self, name: str, measured: Mapping[str, Mapping[ObservationKey, Observation]]) -> int:
        """The number of that kind; some job of it has measured this, by GPU type."""
        if name not in self._number:
            self._number[name] = self._next_number
            self._next_number += 1
        for gpu_type, seen in measured.items():
            self.on(gpu_type).note(self._number[name], seen)
        return self._number[name]

    def _forget(self, in_use: set[int]) -> None:
        """Kinds that no job is of any longer, unless the registry has kept them."""
        gone = [name for name, number in self._number.items() if number not in in_use and name not in self._ended]
        for name in gone:
            number = self._number.pop(name)
            for on_type in self._on.values():
                on_type.forget(number)


class OnType(Fits):
    """Models of jobs on one GPU type, by their kinds."""

    def __init__(self, gpu_type: str, kinds: Kinds) -> None:
        self._gpu_type = gpu_type
        self._kinds = kinds
        self._pools: dict[int, Kind] = {}
        self._models: dict[int, Corrected | None] = {}  # of each kind, as in the last round
        self._noted: set[int] = set()  # kinds of which there may be another since
        self._believed: dict[int, tuple[Corrected, float]] = {}  # by row; nothing for those whose own fits count
        self._is_believed: FloatArray = np.zeros(0, dtype=bool)  # by row
        self._read: FloatArray = np.full(0, -1)  # by row: the moment's version of its job
        self._version: FloatArray = np.full(0, -1)  # by row
        self._versions = 0

    def note(self, number: int, measured: Mapping[ObservationKey, Observation]) -> None:
        if number not in self._pools:
            self._pools[number] = Kind()
        self._pools[number].note(measured)
        self._noted.add(number)

    def forget(self, number: int) -> None:
        self._noted.discard(number)
        self._pools.pop(number, None)
        self._models.pop(number, None)

    def versions(self, moment: Moment, members: FloatArray) -> FloatArray:
        rows, version = moment.row[members], moment.version[members]
        missing = len(self._kinds.of_row) - len(self._read)
        if missing > 0:
            self._read = np.concatenate([self._read, np.full(missing, -1)])
            self._version = np.concatenate([self._version, np.full(missing, -1)])
            self._is_believed = np.concatenate([self._is_believed, np.zeros(missing, dtype=bool)])
        is_new, changed = self._read[rows] != version, self._changed()
        if changed or is_new.any():
            self._believe(moment, members, rows, is_new, changed)
            self._read[rows] = version
        return np.asarray(self._version[rows])

    def _changed(self) -> list[int]:
        """Kinds whose models are others than when this was last asked."""
        models = {number: self._pools[number].model() for number in self._noted}
        self._noted.clear()
        changed = [number for number, model in models.items() if model is not self._models.get(number)]
        self._models.update(models)
        return changed

    def _believe(
        self, moment: Moment, members: FloatArray, rows: FloatArray, is_new: FloatArray, changed: list[int]
    ) -> None:
        """Look again at jobs that are new or have measured more, and at all of a kind whose model has changed."""
        kinds, jobs = self._kinds.of_row[rows], moment.jobs
        stale = is_new | np.isin(kinds, changed) if changed else is_new
        for index in stale.nonzero()[0].tolist():
            row, job = int(rows[index]), jobs[int(members[index])]
            known = self._believed.pop(row, None)
            found = self._found(self._models.get(int(kinds[index])), job)
            self._is_believed[row] = found is not None
            if found is not None:
                self._believed[row] = found
            if is_new[index] or found != known:
                self._versions += 1
                self._version[row] = self._versions

    def model_of(self, row: int, job: Job, gpu_type: str, options: BatchOptions) -> GoodputModel | None:
        believed = self._believed.get(row)
        if believed is None or job.model is None:
            return super().model_of(row, job, gpu_type, options)
        model, scale = believed
        return GoodputModel(model, (scale,), UNKNOWN_GRADIENT, job.model.limits, options)

    def is_foreseen(self, rows: FloatArray) -> FloatArray:
        return np.asarray(self._is_believed[rows])

    def _found(self, model: Corrected | None, job: Job) -> tuple[Corrected, float] | None:
        """What to believe of a job whose kind has that model; None: its own fit."""
        own = None if job.model is None else job.model.throughput.get(self._gpu_type)
        if model is None or (own is not None and own.model != PAPER.name):
            return None
        scale = scale_of(model, job.profile.of_type(self._gpu_type))
        return None if scale is None else (model, scale)
