"""The workloads of a reproduction: the paper's own samples, or generated ones that are like them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from pollux.core import Cluster
from pollux.errors import InvalidInput
from pollux.simulator.cluster_file import ClusterFile
from pollux.simulator.comparison import prepare_once
from pollux.simulator.generator import BUILT_IN, GeneratorOptions, generate
from pollux.simulator.scenario import GPU_TYPE, Scenario
from pollux.simulator.studies.loads import count_at
from pollux.simulator.studies.published import Results, read_results

FOLDER = "pollux-osdi21"
"""Of the data that belongs to the paper."""
RESULTS = "published-results.json"
NUM_GENERATED = 4


def paper_cluster() -> ClusterFile:
    return ClusterFile(Cluster.uniform(16, 4, GPU_TYPE))


class Samples(Protocol):
    """Where the jobs come from."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def cluster(self) -> ClusterFile: ...

    @property
    def description(self) -> str:
        """What they are, as the summary of a report says it."""
        ...

    def scenario(self, sample: str, load: float = 1.0, is_realistic: bool = False) -> Scenario:
        """Of one sample; its policy is to be replaced."""
        ...

    def published(self, policy: str, load: float = 1.0) -> Mapping[str, float]:
        """What the artifact published for these very samples, as means; nothing if that is not known."""
        ...


@dataclass(frozen=True, slots=True)
class PaperSamples:
    """Those of the artifact, on its measured traces."""

    folder: Path
    names: Sequence[str]
    results: Results
    cluster: ClusterFile = field(default_factory=paper_cluster)

    @property
    def description(self) -> str:
        return f"{_listed(self.names)} of the paper's eight, with its measured traces as the truth"

    def scenario(self, sample: str, load: float = 1.0, is_realistic: bool = False) -> Scenario:
        kind = "workloads-realistic" if is_realistic else "workloads" if load == 1 else f"workloads-{load:.1f}"
        path = self.folder / kind / f"{sample}.csv"
        return Scenario(str(path), "fifo", self.cluster, self.folder / "traces")

    def published(self, policy: str, load: float = 1.0) -> Mapping[str, float]:
        found = []
        for sample in self.names:
            jobs = prepare_once(self.scenario(sample, load)).workload.jobs
            figures = self.results.figures(policy, load, sample, jobs)
            if figures is None:
                return {}
            found.append(figures)
        return {key: sum(figures[key] for figures in found) / len(found) for key in found[0]}


@dataclass(frozen=True, slots=True)
class GeneratedSamples:
    """Generated workloads on the built-in applications, each from a seed of its own."""

    names: Sequence[str]
    base: GeneratorOptions
    """Of the first; the seed of each other one is one more than that before it."""
    cluster: ClusterFile = field(default_factory=paper_cluster)

    @property
    def description(self) -> str:
        count = f"{len(self.names)} generated workloads" if len(self.names) > 1 else "one generated workload"
        return f"{count} on the built-in applications: the paper's own data was not found"

    def scenario(self, sample: str, load: float = 1.0, is_realistic: bool = False) -> Scenario:
        options = replace(
            self.base,
            seed=self.base.seed + self.names.index(sample),
            num_jobs=count_at(self.base.num_jobs, load),
            configuration="realistic" if is_realistic else "tuned",
        )
        return Scenario(sample, "fifo", self.cluster, content=replace(generate(options), name=sample))

    def published(self, policy: str, load: float = 1.0) -> Mapping[str, float]:
        return {}


def generated_samples(count: int | None) -> GeneratedSamples:
    """As the built-in workload `paper`, and more of its kind."""
    base = BUILT_IN["paper"].options
    assert base is not None
    return GeneratedSamples([f"generated-{base.seed + index}" for index in range(count or NUM_GENERATED)], base)


def paper_samples(data: Path, count: int | None, named_by: str = "--data") -> PaperSamples:
    """The first so many samples of a folder of data; all of them, if no number is given.

    `named_by` is where the folder was named, as an error says it.
    """
    folder = data / FOLDER
    for needed in ("workloads", "traces", RESULTS):
        if not (folder / needed).exists():
            problem = f"there is no {FOLDER}/{needed} in it"
            raise InvalidInput(named_by, str(data), problem, "Name the folder of the paper's data, or none at all")
    names = sorted(path.stem for path in (folder / "workloads").glob("*.csv"))
    if not names or (count is not None and count > len(names)):
        raise InvalidInput("--workloads", count, f"there are {len(names)} in {folder}", "Give fewer, or leave it out")
    return PaperSamples(folder, names[:count], read_results(folder / RESULTS))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
