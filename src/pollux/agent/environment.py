"""What the launcher tells a replica: the only place in the agent that reads environment variables.

RANK, WORLD_SIZE, LOCAL_RANK             set by torchrun; absent: one process
LOCAL_WORLD_SIZE, GROUP_WORLD_SIZE       set by torchrun: replicas on this node, number of nodes
POLLUX_JOB, POLLUX_GENERATION            who the reports are about
POLLUX_CHECKPOINT_DIR                    where checkpoints go if the script does not say
POLLUX_REPORT_URL, POLLUX_TOKEN_FILE     where reports go without a daemon, and the file that holds the token for it
POLLUX_SOCKET, POLLUX_REPLICA            set by a node daemon: its local socket, and what it calls this replica
POLLUX_CREDENTIAL                        by which this replica shows the daemon who it is; good for nothing else
POLLUX_JOB_SECRET                        by which replicas of the job know each other; see transfer.py
POLLUX_STORE                             host:port of the store where the replicas of the job find each other
POLLUX_NEWCOMER                          1: others train already, and this one joins them when it is told to
POLLUX_HEARTBEAT_S                       seconds from one sign of life to the next
POLLUX_GPU_TYPE                          what the scheduler calls the GPUs of this node
POLLUX_EXPERIENCE                        the file that says what other jobs of its kind have measured, if there is one
POLLUX_GROUP_TIMEOUT_S                   seconds after which a replica that waits for another takes it for lost

On an emulated cluster (see emulation.py):

POLLUX_COMPRESS                          how many seconds of the emulated cluster pass in one; set: it is emulated
POLLUX_REALLOC_DELAY_S                   for how long its jobs do not train after a start or a change of their GPUs
POLLUX_MACHINE_SLOTS                     slots of all its nodes that share this machine

What the job's specification says about batch sizes, in place of the script's options:

POLLUX_INITIAL_BATCH_SIZE                M0, in place of the loader's batch size
POLLUX_MAX_BATCH_SIZE                    the largest in all
POLLUX_MIN_PER_GPU_BATCH_SIZE, POLLUX_MAX_PER_GPU_BATCH_SIZE
POLLUX_BATCH_SIZE                        what to begin with, in place of M0
POLLUX_FIXED_BATCH                       1: the batch size stays what it is in the beginning
"""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pollux.errors import InvalidSpec


@dataclass(frozen=True, slots=True)
class BatchVariables:
    """What the job's owner asks for beside the script; None: as the script says."""

    initial_batch_size: int | None = None
    max_batch_size: int | None = None
    min_per_gpu_batch_size: int | None = None
    max_per_gpu_batch_size: int | None = None
    batch_size: int | None = None
    is_fixed: bool = False

    @classmethod
    def read(cls, given: Mapping[str, str]) -> BatchVariables:
        names = ("initial_batch_size", "max_batch_size", "min_per_gpu_batch_size", "max_per_gpu_batch_size")
        sizes = {name: _size(given, variable(name)) for name in (*names, "batch_size")}
        for lower, upper in (
            ("initial_batch_size", "max_batch_size"),
            ("initial_batch_size", "batch_size"),
            ("batch_size", "max_batch_size"),
            ("min_per_gpu_batch_size", "max_per_gpu_batch_size"),
        ):
            low, high = sizes[lower], sizes[upper]
            if low is not None and high is not None and low > high:
                fix = f"Correct {lower} or {upper} in the job's specification"
                raise InvalidSpec(variable(lower), low, f"greater than {variable(upper)} = {high}", fix)
        fixed = given.get("POLLUX_FIXED_BATCH") or "0"
        if fixed not in ("0", "1"):
            raise InvalidSpec(
                "POLLUX_FIXED_BATCH", fixed, "neither 0 nor 1", "Give 1 to keep the batch size, or unset it"
            )
        return cls(**sizes, is_fixed=fixed == "1")


def variable(name: str) -> str:
    """The one that stands for this option."""
    return f"POLLUX_{name.upper()}"


@dataclass(frozen=True, slots=True)
class EmulatedCluster:
    """What a job must know of the cluster that its own is to behave like."""

    compress: float = 1.0
    """Its seconds in one of ours."""
    realloc_delay_s: float = 0.0
    """In its seconds."""
    machine_slots: int = 1

    @classmethod
    def read(cls, given: Mapping[str, str]) -> EmulatedCluster | None:
        """None: nothing is emulated."""
        if not given.get("POLLUX_COMPRESS"):
            return None
        delay = given.get("POLLUX_REALLOC_DELAY_S") or "0"
        return cls(
            _seconds(given, "POLLUX_COMPRESS", 1.0),
            0.0 if delay == "0" else _seconds(given, "POLLUX_REALLOC_DELAY_S", 0.0),
            _whole(given, "POLLUX_MACHINE_SLOTS", 1, 1),
        )


@dataclass(frozen=True, slots=True)
class Environment:
    """One replica's place among the others, and where its results go."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    num_nodes: int = 1
    job: str = "local"
    generation: int = 1
    checkpoint_dir: Path | None = None
    report_url: str | None = None
    token: str | None = field(default=None, repr=False)
    socket: str | None = None
    replica: str = ""
    credential: str = field(default="", repr=False)
    job_secret: str = field(default="", repr=False)
    store: str | None = None
    is_newcomer: bool = False
    heartbeat_s: float = 1.0
    group_timeout_s: float = 1800.0
    gpu_type: str | None = None
    experience: Path | None = None
    batch: BatchVariables = field(default_factory=BatchVariables)
    emulated: EmulatedCluster | None = None

    @property
    def is_managed(self) -> bool:
        """A node daemon started this replica, and tells it whom to train with."""
        return self.socket is not None

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """From these variables, by default the process's own."""
        given = ChainMap(_taken, os.environ) if variables is None else variables
        size = _whole(given, "WORLD_SIZE", 1, 1)
        rank = _whole(given, "RANK", 0, 0)
        if rank >= size:
            raise InvalidSpec("RANK", rank, f"not below WORLD_SIZE = {size}", "Start the script with torchrun")
        on_this_node = _whole(given, "LOCAL_WORLD_SIZE", size, 1)
        folder, token_file = given.get("POLLUX_CHECKPOINT_DIR"), given.get("POLLUX_TOKEN_FILE")
        experience = given.get("POLLUX_EXPERIENCE")
        return cls(
            rank=rank,
            size=size,
            local_rank=_whole(given, "LOCAL_RANK", 0, 0),
            num_nodes=min(_whole(given, "GROUP_WORLD_SIZE", max(1, size // on_this_node), 1), size),
            job=given.get("POLLUX_JOB") or "local",
            generation=_whole(given, "POLLUX_GENERATION", 1, 1),
            checkpoint_dir=Path(folder) if folder else None,
            report_url=given.get("POLLUX_REPORT_URL") or None,
            token=_read_token(Path(token_file)) if token_file else None,
            socket=given.get("POLLUX_SOCKET") or None,
            replica=given.get("POLLUX_REPLICA") or "",
            credential=given.get("POLLUX_CREDENTIAL") or "",
            job_secret=given.get("POLLUX_JOB_SECRET") or "",
            store=given.get("POLLUX_STORE") or None,
            is_newcomer=given.get("POLLUX_NEWCOMER") == "1",
            heartbeat_s=_seconds(given, "POLLUX_HEARTBEAT_S", 1.0),
            group_timeout_s=_seconds(given, "POLLUX_GROUP_TIMEOUT_S", 1800.0),
            gpu_type=given.get("POLLUX_GPU_TYPE") or None,
            experience=Path(experience) if experience else None,
            batch=BatchVariables.read(given),
            emulated=EmulatedCluster.read(given),
        )


_taken: dict[str, str] = {}


def take_credentials() -> None:
    """Out of the process's environment, for `Environment.read` alone: the programs that a script starts do not inherit
    them, and nobody finds them in what the system shows of these."""
    for name in ("POLLUX_CREDENTIAL", "POLLUX_JOB_SECRET"):
        if (value := os.environ.pop(name, None)) is not None:
            _taken[name] = value


def _whole(given: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = given.get(name) or str(default)
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise InvalidSpec(name, text, f"not a whole number from {least} on", "Leave it to torchrun or Pollux to set it")
    return value


def _size(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        fix = "Correct it in the job's specification, or unset it"
        raise InvalidSpec(name, text, "not a whole number from 1 on", fix)
    return int(text)


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    text = given.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise InvalidSpec(name, text, "not a number above 0", "Leave it to Pollux to set it")
    return value


def _read_token(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError as error:
        raise InvalidSpec(
            "POLLUX_TOKEN_FILE", str(path), f"cannot be read ({error.strerror})", "Let Pollux start the job"
        ) from None
