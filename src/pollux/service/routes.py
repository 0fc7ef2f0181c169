"""Every route of the API, once: `rest` serves this table and `openapi` describes it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pollux.core import Phase
from pollux.wire import api

JOB_DOCUMENT = "JobDocument"
"""Stands for the job specification, whose schema `wire.jobspec` publishes."""
REGISTRY_DOCUMENT = "RegistryDocument"
"""Stands for `core.ProfileRegistry` in the envelope of core's codec, as it is written to files."""
MAX_WAIT_S = 30.0
MAX_EVENTS = 1000
MAX_LOG_BYTES = 1 << 20
NEXT_OFFSET = "Pollux-Next-Offset"
"""The header that says where the next part of a log begins."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A part of the query, or of the path if the path names it."""

    name: str
    kind: type
    """bool, int, float or str."""
    description: str
    default: Any = None
    """None: left out means not asked for."""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One thing that can be asked."""

    method: str
    path: str
    name: str
    """Of the function in `rest` that answers, and of the operation in the document."""
    summary: str
    answer: Any
    """A class of `wire.api`; `str`: plain text; `dict`: any JSON object; REGISTRY_DOCUMENT."""
    status: int = 200
    parameters: tuple[Parameter, ...] = ()
    """Of the query."""
    body: Any = None
    """What must be sent: a class of `wire.api`, JOB_DOCUMENT or REGISTRY_DOCUMENT."""
    changes: bool = False
    """It gives an order, which a service that is recovering does not take."""
    is_open: bool = False
    """It needs no token."""
    also: dict[int, str] = field(default_factory=dict)
    """Other statuses that the same answer may come with."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of the answer, by name: what they say."""

    @property
    def path_parameters(self) -> tuple[Parameter, ...]:
        return tuple(_IN_PATH[name] for name in re.findall(r"{(\w+)}", self.path))

    @property
    def problems(self) -> tuple[int, ...]:
        """The statuses of the errors that it may answer with, besides those that all may."""
        found = set() if self.is_open else {401}
        if self.path_parameters or any(parameter.name == "job" for parameter in self.parameters):
            found |= {404, 409}
        if self.body is not None:
            found |= {400, 408, 413, 415}
        if self.changes or "logs" in self.path:
            found.add(503)
        if self.changes:
            found.add(507)
        return tuple(sorted(found))


_IN_PATH = {
    "job": Parameter("job", str, "Id of the job, or its name: that of the job that has not ended, else of the latest."),
    "node": Parameter("node", str, "Id of the node."),
    "replica": Parameter("replica", str, "As the list of logs calls it."),
}


def _job_order(verb: str, summary: str) -> RouteSpec:
    return RouteSpec("POST", f"/v1/jobs/{{job}}/{verb}", f"{verb}_job", summary, api.JobView, 202, changes=True)


def _node_order(verb: str, summary: str) -> RouteSpec:
    return RouteSpec("POST", f"/v1/nodes/{{node}}/{verb}", f"{verb}_node", summary, api.ClusterView, changes=True)


ROUTES: tuple[RouteSpec, ...] = (
    RouteSpec("GET", "/v1/health", "health", "Is the service there?", api.Health, is_open=True),
    RouteSpec("GET", "/v1/openapi.json", "openapi", "This description.", dict),
    RouteSpec("GET", "/v1/job-schema.json", "job_schema", "JSON Schema of a job specification.", dict),
    RouteSpec("GET", "/v1/cluster", "cluster", "Nodes, GPUs and the policy.", api.ClusterView),
    _node_order("drain", "Put nothing new on a node, and move what it holds."),
    _node_order("undrain", "Use a drained node again."),
    RouteSpec(
        "POST",
        "/v1/jobs",
        "submit_job",
        "Submit a job.",
        api.JobView,
        201,
        (Parameter("dry_run", bool, "Only check it: the answer is what the job would be, without an id.", False),),
        JOB_DOCUMENT,
        changes=True,
        also={200: "What it would be: with dry_run nothing is submitted."},
    ),
    RouteSpec(
        "GET",
        "/v1/jobs",
        "list_jobs",
        "Jobs that have not ended, in order of arrival.",
        api.JobList,
        parameters=(
            Parameter("all", bool, "Those that have ended, too.", False),
            Parameter("team", str, "Only of this team."),
            Parameter(
                "phase",
                str,
                "Only in this phase; ended ones need no `all` then.",
                choices=tuple(p.value for p in Phase),
            ),
        ),
    ),
    RouteSpec("GET", "/v1/jobs/{job}", "job", "All about one job.", api.JobDetail),
    _job_order("pause", "Have a job save and give back its GPUs until it is resumed."),
    _job_order("resume", "End the pause of a job."),
    _job_order("cancel", "End a job for good."),
    RouteSpec(
        "POST",
        "/v1/jobs/{job}/scale",
        "scale_job",
        "Change how many GPUs a job may have.",
        api.JobView,
        body=api.ScaleRequest,
        changes=True,
    ),
    RouteSpec("GET", "/v1/jobs/{job}/logs", "list_logs", "What the replicas of a job have printed.", api.LogList),
    RouteSpec(
        "GET",
        "/v1/jobs/{job}/logs/{node}/{replica}",
        "read_log",
        "A part of what one replica has printed.",
        str,
        parameters=(
            Parameter("offset", int, "Where to begin, in bytes; a negative one counts from the end.", 0),
            Parameter("limit", int, "How many bytes at most.", 1 << 16, 1, MAX_LOG_BYTES),
        ),
        headers={NEXT_OFFSET: "Where the next part begins, in bytes."},
    ),
    RouteSpec(
        "GET",
        "/v1/events",
        "events",
        "What happened, oldest first: events of the scheduler and notices of the jobs.",
        api.EventPage,
        parameters=(
            Parameter("after", int, "Only those with a higher sequence number.", 0, 0),
            Parameter("last", int, "Only the newest so many of them.", None, 1, MAX_EVENTS),
            Parameter("limit", int, "How many at most.", 500, 1, MAX_EVENTS),
            Parameter("job", str, "Only about this job: its id or its name."),
            Parameter("wait_s", float, "If there are none, wait so many seconds for one.", 0.0, 0.0, MAX_WAIT_S),
        ),
    ),
    RouteSpec("GET", "/v1/kinds", "list_kinds", "The profile registry: what is known of each kind.", api.KindList),
    RouteSpec("GET", "/v1/kinds/export", "export_kinds", "The profile registry, to be kept.", REGISTRY_DOCUMENT),
    RouteSpec(
        "POST",
        "/v1/kinds/import",
        "import_kinds",
        "Add what another cluster has learnt to the profile registry.",
        api.KindList,
        parameters=(Parameter("replace", bool, "In place of all that is there.", False),),
        body=REGISTRY_DOCUMENT,
        changes=True,
    ),
    RouteSpec(
        "POST",
        "/v1/shutdown",
        "shutdown",
        "End the service.",
        api.Health,
        202,
        body=api.ShutdownRequest,
    ),
)
