"""The document of a job, as YAML, JSON or flags give it: from there to the `JobSpec` that the scheduler knows.

    document ── parse ──▶ JobRequest ── spec ──▶ JobSpec ── launch.launch_of ──▶ Launch

`parse` finds every fault at once and raises `InvalidJob`. It looks at no file and no environment: `check_files` and
`resolve_env` do. What the document may hold is in one table, `fields.FIELDS`.
"""

from pollux.wire.jobspec.fields import json_schema, markdown_table
from pollux.wire.jobspec.files import check_files, uses_pollux
from pollux.wire.jobspec.parsing import parse, resolve_env
from pollux.wire.jobspec.request import JobRequest

__all__ = [
    "JobRequest",
    "check_files",
    "json_schema",
    "markdown_table",
    "parse",
    "resolve_env",
    "uses_pollux",
]
