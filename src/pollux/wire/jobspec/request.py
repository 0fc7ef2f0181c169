"""A job that somebody wants to run, after its document was read and before the scheduler knows it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pollux.core import BatchWishes, FrozenMap, JobId, JobSpec
from pollux.errors import InvalidJob
from pollux.wire.jobspec.command import Complaint, find_script
from pollux.wire.jobspec.fields import DEFAULT_RETRIES, FIELDS
from pollux.wire.jobspec.reading import Reading


@dataclass(frozen=True, slots=True)
class JobRequest:
    """Each field as the document has it, paths absolute. Without `gpus` elastic."""

    command: tuple[str, ...]
    working_dir: str
    name: str
    env: FrozenMap[str, str] = field(default_factory=FrozenMap, repr=False)
    """Secrets: not in the repr."""
    gpus: int | None = None
    min_gpus: int = 1
    max_gpus: int | None = None
    gpu_type: str | None = None
    requested_gpus: int | None = None
    batch_size: int | None = None
    initial_batch_size: int | None = None
    max_batch_size: int | None = None
    min_per_gpu_batch_size: int | None = None
    max_per_gpu_batch_size: int | None = None
    fixed_batch: bool = False
    preemptible: bool | None = None
    priority: int = 0
    team: str | None = None
    deadline_s: float | None = None
    checkpoint_dir: str | None = None
    retries: int = DEFAULT_RETRIES
    application: str | None = None

    @property
    def is_plain(self) -> bool:
        """Any program, on a fixed number of GPUs."""
        return self.gpus is not None

    @property
    def script(self) -> str | None:
        """The absolute path of what `python` runs; None if that is not what the command does."""
        found = find_script(self.command)
        return None if isinstance(found, Complaint) else os.path.join(self.working_dir, self.command[found])

    def with_gpus(self, gpus: int | None = None) -> JobRequest:
        """The same as a plain command, for scripts that do not use pollux.torch.

        None: on `requested_gpus`, or else `min_gpus`. Raises `InvalidJob` if something was asked for that only
        Pollux could do, rather than forget it.
        """
        if self.is_plain:
            return self if gpus is None else replace(self, gpus=gpus)
        size = gpus or self.requested_gpus or self.min_gpus
        reading = Reading()
        for name in ("min_gpus", "max_gpus"):
            bound = getattr(self, name)
            if bound is not None and (size < bound if name == "min_gpus" else size > bound):
                problem = f"the script does not use pollux.torch, so that it would run on exactly {size}"
                reading.fault(name, bound, problem, "Leave it out, or adapt the script: see docs/agent.md")
        for entry in FIELDS:
            given = getattr(self, entry.attribute)
            if entry.is_elastic and not entry.name.endswith("gpus") and given not in (None, False):
                problem = "the script does not use pollux.torch, so that it would have no effect"
                reading.fault(entry.name, given, problem, "Leave it out, or adapt the script: see docs/agent.md")
        if reading.faults:
            raise InvalidJob(reading.sorted_faults())
        return replace(self, gpus=size, min_gpus=1, max_gpus=None, requested_gpus=None)

    def spec(self, job_id: JobId, checkpoint_dir: str) -> JobSpec:
        """For the scheduler. The folder is where it saves if the request names none."""
        size = self.gpus
        return JobSpec(
            id=job_id,
            name=self.name,
            command=self.command,
            working_dir=self.working_dir,
            env=self.env,
            checkpoint_dir=self.checkpoint_dir or checkpoint_dir,
            application=self.application,
            min_gpus=self.min_gpus if size is None else size,
            max_gpus=self.max_gpus if size is None else size,
            gpu_type=self.gpu_type,
            requested_gpus=self.requested_gpus if size is None else size,
            rigid=size is not None,
            single_node=size is not None,
            preemptible=size is None if self.preemptible is None else self.preemptible,
            batch=BatchWishes(
                self.initial_batch_size,
                self.max_batch_size,
                self.min_per_gpu_batch_size,
                self.max_per_gpu_batch_size,
            ),
            requested_batch_size=self.batch_size,
            fixed_batch=self.fixed_batch,
            priority=self.priority,
            team=self.team or "",
            deadline_s=self.deadline_s,
            retries=self.retries,
        )

    def as_document(self) -> dict[str, Any]:
        """What the REST API takes; `parse` makes the same request of it. Values of env are in it."""
        defaults = {entry.name: entry.default for entry in fields(self)}
        document: dict[str, Any] = {}
        for entry in FIELDS:
            value = getattr(self, entry.attribute)
            if value is None or value == defaults[entry.attribute]:
                continue
            match value:
                case tuple():
                    document[entry.name] = list(value)
                case FrozenMap():
                    document[entry.name] = dict(value)
                case _:
                    document[entry.name] = value
        return document
