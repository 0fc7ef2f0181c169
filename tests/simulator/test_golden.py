"""Six small workloads whose event logs are kept beside this file; `pytest --update-golden` writes them anew.

Floats are kept to nine significant digits, of a fit only what it rests on, of a profile only its size and of a search
nothing: powers and fits may end in other last bits with another libm, numba or CPU. On one machine logs are equal byte
for byte, which the second half tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.simulator.scenes import EQUAL_SHARE, GENETIC, log_text, run_jobs

from pollux.core import Cluster, FrozenMap, Node, NodeId, NodeJoined, NodeLost
from pollux.policies import registry
from pollux.simulator.cluster_file import NodeChange
from pollux.simulator.options import Options
from pollux.simulator.settings import applied
from pollux.simulator.truth import truths_built_in
from pollux.simulator.workload import WorkloadJob

FOLDER = Path(__file__).with_name("golden")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Scene:
    policy: str
    jobs: Sequence[WorkloadJob]
    cluster: Cluster
    settings: FrozenMap[str, object] = FrozenMap()  # noqa: RUF009 - it cannot change
    changes: Sequence[NodeChange] = ()

    def log(self) -> str:
        options = applied(Options(), self.settings)
        world = run_jobs(self.policy, self.jobs, truths_built_in(), self.cluster, options, self.changes)
        return log_text(world.scheduler.log)


def ncf(name: str, at_s: float, gpus: int = 1, batch_size: int = 4096) -> WorkloadJob:
    return WorkloadJob(name, at_s, "ncf", gpus, batch_size)


def cifar(name: str, at_s: float, gpus: int = 1, batch_size: int = 512) -> WorkloadJob:
    return WorkloadJob(name, at_s, "cifar10", gpus, batch_size)


def node(name: str, gpus: int) -> Node:
    return Node(NodeId(name), gpus, "t4")


SCENES = {
    "fifo-queue": Scene(
        "fifo",
        [ncf("a", 0, 2), cifar("b", 5, 3, 1024), ncf("c", 6, 1), ncf("d", 130, 1)],
        Cluster.uniform(1, 4, "t4"),
    ),
    "tiresias-demotion": Scene(
        "tiresias",
        [cifar("long", 0, 4, 2048), ncf("a", 100, 2), ncf("b", 400, 4, 8192), cifar("wide", 430, 2, 1024)],
        Cluster.uniform(2, 2, "t4"),
        FrozenMap({"policy.service_threshold_gpu_s": 600.0}),
    ),
    "optimus-reallocations": Scene(
        "optimus",
        [cifar("a", 0, 1, 1024), ncf("b", 70), cifar("c", 100, 1, 512), ncf("d", 310), ncf("e", 311)],
        Cluster.uniform(2, 3, "t4"),
    ),
    "srtf-uneven-cluster": Scene(
        "srtf",
        [cifar("a", 0, 3, 1024), ncf("b", 30, 2), cifar("c", 61, 2, 512), ncf("d", 200, 1)],
        Cluster.of(node("large", 3), node("middle", 2), node("small", 1)),
        FrozenMap({"world.node_repair_s": 100.0}),
        [
            NodeChange(150.0, NodeLost(NodeId("large"))),
            NodeChange(333.0, NodeJoined(node("new", 4))),
            NodeChange(500.0, NodeLost(NodeId("small"))),
        ],
    ),
    "adaptive-in-place": Scene(
        EQUAL_SHARE,
        [cifar("a", 0), ncf("b", 10), ncf("c", 290)],
        Cluster.uniform(3, 2, "t4"),
        FrozenMap({"scheduler.in_place": True, "world.interference": 0.25}),
        [NodeChange(345.0, NodeLost(NodeId("node-1")))],
    ),
    "pollux-co-adaptation": Scene(
        "pollux",
        [cifar("a", 0), ncf("b", 70), cifar("c", 200), ncf("d", 310), ncf("e", 311), cifar("f", 900)],
        Cluster.of(node("large", 4), node("other", 4), node("small", 2)),
        FrozenMap({"world.interference": 0.25}),
        [NodeChange(1500.0, NodeLost(NodeId("large"))), NodeChange(2400.0, NodeJoined(node("large", 4)))],
    ),
}


def stable(log: str) -> str:
    """A log without what may differ between machines."""
    return "".join(f"{json.dumps(_stable(json.loads(line)), separators=(',', ':'))}\n" for line in log.splitlines())


def _stable(value: object) -> object:
    match value:
        case float():
            return float(f"{value:.9g}")
        case list():
            return [_stable(item) for item in value]
        case dict():
            kept = {key: item for key, item in value.items() if key not in ("params", "mean_relative_error", "stats")}
            if isinstance(profile := kept.get("profile"), dict):
                kept["profile"] = {gpu_type: len(seen) for gpu_type, seen in profile["observations"].items()}
            return {key: _stable(item) for key, item in kept.items()}
    return value


@pytest.mark.parametrize("name", SCENES)
def test_the_event_log_is_the_one_kept(name, request):
    found, path = stable(SCENES[name].log()), FOLDER / f"{name}.jsonl"
    if request.config.getoption("--update-golden"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    for number, (now, before) in enumerate(zip(found.splitlines(), kept.splitlines(), strict=False), 1):
        assert now == before, f"{path.name}, line {number}"
    assert found == kept, f"{path.name} is shorter or longer now; if that is meant: pytest --update-golden"


def test_what_is_kept_shows_what_it_is_kept_for():
    kept = {name: (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8") for name in SCENES}
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(kept)
    assert kept["tiresias-demotion"].count('"JobStopped"') >= 2, "pre-emption"
    assert kept["optimus-reallocations"].count('"JobStopped"') >= 3, "re-allocation"
    assert kept["srtf-uneven-cluster"].count('"NodeLost"') == 2
    batch_free = kept["pollux-co-adaptation"]
    assert batch_free.count('"JobReported"') > 50
    assert batch_free.count('"JobStopped"') >= 5, "re-allocation"
    assert '"other":4,"small":2' in batch_free, "a job on two nodes"
    for kind in ("JobReported", "ReplicaLost"):
        assert f'"{kind}"' in kept["adaptive-in-place"]


MIXED = Scene(
    "",
    [
        cifar("a", 0, 2, 1024),
        ncf("b", 1, 3),
        cifar("c", 62, 1),
        ncf("d", 63, 2),
        cifar("e", 300, 4, 2048),
        ncf("f", 301),
    ],
    Cluster.of(node("large", 4), node("middle", 2), node("small", 1)),
    FrozenMap({"seed": 7, "world.node_mtbf_s": 1500.0, "world.node_repair_s": 400.0, "world.interference": 0.2}),
)
EVERY_POLICY = (*registry.BUILT_IN, EQUAL_SHARE, GENETIC)


def mixed_log(policy: str) -> str:
    return Scene(policy, MIXED.jobs, MIXED.cluster, MIXED.settings).log()


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_the_same_seed_gives_the_same_bytes(policy):
    first = mixed_log(policy)
    assert first == mixed_log(policy)
    assert '"NodeLost"' in first


def test_the_same_seed_gives_the_same_bytes_in_another_process():
    """With another order of hashed texts, for all policies at once: starting Python is what takes the time."""
    command = [sys.executable, "-c", "from tests.simulator.test_golden import digests; print(digests())"]
    outputs = [
        subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert outputs == [digests()] * 2


def digests() -> str:
    import hashlib

    logs = {policy: mixed_log(policy) for policy in EVERY_POLICY}
    return json.dumps({policy: hashlib.sha256(log.encode()).hexdigest() for policy, log in logs.items()})
