"""The one table of what the document of a job may hold. Parser, JSON Schema, command line and docs are made of it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from pollux.wire.jobspec.kinds import (
    Command,
    Duration,
    Environment,
    Flag,
    FolderPath,
    Kind,
    Name,
    TaskName,
    Text,
    Whole,
)

MAX_GPUS = 1 << 16
MAX_BATCH = 1 << 31
MAX_PRIORITY = 1_000_000
MAX_RETRIES = 1000
DEFAULT_RETRIES = 3

PLAIN_FIX = "add gpus: n (--gpus n) to run it as it is, on n GPUs of one node"


@dataclass(frozen=True)
class Field:
    name: str
    kind: Kind
    description: str
    example: Any
    default: Any = None
    """What JSON may say instead of leaving it out; None: see `default_text`."""
    default_text: str = ""
    also: tuple[str, ...] = ()
    """What others call it: the answer to such a key is this name."""
    is_elastic: bool = False
    """Means nothing for a plain command."""

    @property
    def attribute(self) -> str:
        """Of a `JobRequest`."""
        return "deadline_s" if self.name == "deadline" else self.name

    @property
    def flag(self) -> str:
        """On the command line."""
        return f"--{self.name.replace('_', '-')}"


_GPUS = Whole(1, MAX_GPUS)
_BATCH = Whole(1, MAX_BATCH)
_AS_SCRIPT = "as the script says"

FIELDS: tuple[Field, ...] = (
    Field(
        "name",
        Name(),
        "What people call the job; need not be unique.",
        "resnet-50",
        default_text="that of the script or program",
        also=("title", "job", "job_name", "id"),
    ),
    Field(
        "command",
        Command(),
        "Program and arguments, as a list or as one text; no shell reads it, so $VAR and * stay as they are. "
        "That of an elastic job is python SCRIPT.py with arguments.",
        ["python", "train.py", "--epochs", "10"],
        default_text="required",
        also=("cmd", "args", "arguments", "script", "run", "entrypoint", "program"),
    ),
    Field(
        "working_dir",
        FolderPath(),
        "Where it runs; relative to the folder of the file, or to where you submit from. "
        "Other paths of the job are relative to it.",
        "~/resnet",
        default_text="folder of the file, or the current one",
        also=("cwd", "workdir", "directory", "dir", "chdir"),
    ),
    Field(
        "env",
        Environment(),
        "Environment variables, beside those that all jobs find. null (--env NAME) takes the value from your "
        "environment when you submit. Values are never shown.",
        {"OMP_NUM_THREADS": "1", "WANDB_API_KEY": None},
        default={},
        also=("environment", "envs", "variables", "vars"),
    ),
    Field(
        "gpus",
        _GPUS,
        "Makes it a plain command: any program, run as it is on exactly so many GPUs of one node.",
        1,
        default_text="none: the job is elastic",
        also=("num_gpus", "gpu", "devices", "slots", "gpu_count"),
    ),
    Field(
        "min_gpus",
        _GPUS,
        "The fewest GPUs that an elastic job runs on. A job that waits holds none all the same.",
        1,
        default=1,
        also=("min_replicas", "minimum_gpus", "gpus_min"),
        is_elastic=True,
    ),
    Field(
        "max_gpus",
        _GPUS,
        "The most GPUs that an elastic job can use.",
        8,
        default_text="no limit",
        also=("max_replicas", "maximum_gpus", "gpus_max"),
        is_elastic=True,
    ),
    Field(
        "gpu_type",
        Text(),
        "Run on this type of GPU only.",
        "a100",
        default_text="any",
        also=("gpu_kind", "accelerator", "device_type"),
    ),
    Field(
        "requested_gpus",
        _GPUS,
        "How many GPUs you would choose; what policies that do not adapt sizes give.",
        4,
        default_text="min_gpus",
        also=("replicas", "num_replicas", "world_size"),
        is_elastic=True,
    ),
    Field(
        "batch_size",
        _BATCH,
        "Total batch size over all GPUs that you would choose: training begins with it, "
        "and with fixed_batch stays there.",
        512,
        default_text="initial_batch_size",
        also=("total_batch_size", "global_batch_size", "bs", "batch"),
        is_elastic=True,
    ),
    Field(
        "initial_batch_size",
        _BATCH,
        "M0: the total batch size that the learning rate was chosen for. Never less is used.",
        128,
        default_text=_AS_SCRIPT,
        also=("m0", "init_batch_size", "base_batch_size"),
        is_elastic=True,
    ),
    Field(
        "max_batch_size",
        _BATCH,
        "The largest total batch size.",
        4096,
        default_text=_AS_SCRIPT,
        also=("m_max", "max_total_batch_size"),
        is_elastic=True,
    ),
    Field(
        "min_per_gpu_batch_size",
        _BATCH,
        "The smallest batch of one GPU in one pass.",
        16,
        default_text=_AS_SCRIPT,
        also=("min_local_batch_size", "min_micro_batch_size"),
        is_elastic=True,
    ),
    Field(
        "max_per_gpu_batch_size",
        _BATCH,
        "The largest batch of one GPU in one pass: what fits into its memory.",
        256,
        default_text=_AS_SCRIPT,
        also=("max_local_batch_size", "max_micro_batch_size"),
        is_elastic=True,
    ),
    Field(
        "fixed_batch",
        Flag(),
        "Keep the total batch size: batch_size, or else the initial one.",
        True,
        default=False,
        also=("fixed_batch_size", "fix_batch"),
        is_elastic=True,
    ),
    Field(
        "preemptible",
        Flag(),
        "Whether its GPUs may all be taken away again before it ends. If not, it keeps at least min_gpus once it runs.",
        False,
        default_text="true; with gpus false",
        also=("is_preemptible", "preemptable", "interruptible"),
    ),
    Field(
        "priority",
        Whole(-MAX_PRIORITY, MAX_PRIORITY),
        "Higher goes first, where the policy knows priorities.",
        10,
        default=0,
        also=("prio", "nice"),
    ),
    Field(
        "team",
        Name(),
        "Whom the job belongs to.",
        "vision",
        default_text="none",
        also=("group", "account", "project", "owner", "user"),
    ),
    Field(
        "deadline",
        Duration(),
        "Wanted ready so long after its submission: seconds, or text like 90m, 2h, 1d, 1h30m.",
        "2h",
        default_text="none",
        also=("deadline_s", "due", "finish_within"),
    ),
    Field(
        "checkpoint_dir",
        FolderPath(),
        "Where it saves; a job that finds a checkpoint there goes on from it.",
        "checkpoints/resnet-50",
        default_text="a folder of its own in the cluster's",
        also=("checkpoints", "checkpoint", "ckpt_dir", "save_dir", "output_dir"),
    ),
    Field(
        "retries",
        Whole(0, MAX_RETRIES),
        "How many failures are answered by another try, from the last checkpoint.",
        5,
        default=DEFAULT_RETRIES,
        also=("max_retries", "restarts", "max_restarts", "attempts"),
    ),
    Field(
        "application",
        TaskName(),
        "The kind of training task. Jobs of one kind behave alike.",
        "imagenet",
        default_text="none",
        also=("app", "task", "kind", "type"),
    ),
)

BY_NAME = {field.name: field for field in FIELDS}
_ALSO = {word: field.name for field in FIELDS for word in (field.name, *field.also)}


def meant_by(key: str) -> str | None:
    """The field whose name is like a key that is none."""
    word = key[:80].strip().lower().replace("-", "_").replace(" ", "_")
    if word in _ALSO:
        return _ALSO[word]
    close = difflib.get_close_matches(word, _ALSO, n=1, cutoff=0.7)
    return _ALSO[close[0]] if close else None


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the document of one job. What fields say of each other is only partly in it."""
    properties: dict[str, Any] = {}
    for field in FIELDS:
        about = field.description
        if field.default is None:
            about += f" Default: {field.default_text}." if field.default_text != "required" else " Required."
        properties[field.name] = {"description": about, **field.kind.schema(), "examples": [field.example]}
        if field.default is not None:
            properties[field.name]["default"] = field.default
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Pollux job",
        "description": "A job for pollux submit, as YAML or JSON. See docs/job-specification.md.",
        "type": "object",
        "properties": properties,
        "required": ["command"],
        "additionalProperties": False,
        "dependentSchemas": {"gpus": {"properties": {field.name: False for field in FIELDS if field.is_elastic}}},
    }


def markdown_table() -> str:
    """The table of docs/job-specification.md."""
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in FIELDS:
        default = field.default_text or f"`{_yaml(field.default)}`"
        rows.append(f"| `{field.name}` | {field.kind.label} | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def _yaml(value: object) -> str:
    return "{}" if value == {} else str(value).lower()
