"""What `pollux demo` submits: jobs, when each arrives, and what each has to reach. See examples/demo.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.cli.job_file import read_documents
from pollux.core import checks
from pollux.errors import InvalidInput, InvalidSpec

FULL, QUICK = "demo.yaml", "demo_quick.yaml"


@dataclass(frozen=True, slots=True)
class Target:
    """What the last line of a job must tell: a metric, not below or not above a bound."""

    metric: str
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        checks.text(InvalidSpec, "metric", self.metric)
        checks.finite(InvalidSpec, "at_least", self.at_least, None, optional=True)
        checks.finite(InvalidSpec, "at_most", self.at_most, None, optional=True)
        if (self.at_least is None) == (self.at_most is None):
            raise InvalidSpec("target", str(self), "needs one bound", "Give at_least or at_most")

    def is_reached_by(self, value: float) -> bool:
        return value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)

    def worst(self, values: list[float]) -> float:
        return min(values) if self.at_least is not None else max(values)

    def __str__(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most or 0.0:g}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One job of the demo."""

    at_s: float
    """Seconds after the first."""
    target: Target
    document: Mapping[str, Any]
    """As the service takes it."""

    def __post_init__(self) -> None:
        checks.finite(InvalidSpec, "at_s", self.at_s, 0)
        checks.text(InvalidSpec, "job.name", self.document.get("name"))

    @property
    def name(self) -> str:
        return str(self.document["name"])


@dataclass(frozen=True, slots=True)
class Workload:
    """What a file of a demo holds."""

    arrivals: tuple[Arrival, ...]
    """In order of arrival; names are unique."""
    kill_service_at_s: float
    """When to kill the service, if that is asked for: while jobs train, and before the last ends."""

    def __post_init__(self) -> None:
        checks.finite(InvalidSpec, "kill_service_at_s", self.kill_service_at_s, 0)
        names = [arrival.name for arrival in self.arrivals]
        if not names or len(set(names)) < len(names):
            raise InvalidSpec("jobs", names, "are none, or two have one name", "Give each job a name of its own")


def read_workload(path: Path) -> Workload:
    """Scripts of the jobs are looked for beside the file."""
    fix = "See examples/demo.yaml"
    try:
        (content,) = (document.content for document in read_documents(path))
        found = [
            Arrival(entry["at_s"], Target(**entry["target"]), {"working_dir": str(path.parent), **entry["job"]})
            for entry in content["jobs"]
        ]
        return Workload(tuple(sorted(found, key=lambda arrival: arrival.at_s)), content["kill_service_at_s"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput("workload", str(path), f"is no workload of a demo ({error!r})", fix) from None
