"""Nodes for tests of jobs whose replicas come and go: real daemons, started once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.elastic.trial import Trial

from pollux.node.launching import LocalCluster

numbers = itertools.count(1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Two nodes, n0 and n1, with 4 slots each. A mere number of replicas is placed on n0."""
    with LocalCluster(nodes=2, slots=4) as cluster:
        yield cluster


class Trials:
    """Makes trials on one cluster, and ends them after the test."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._made: list[Trial] = []

    def __call__(self, *arguments: object, **options: Any) -> Trial:
        """`Trial(cluster, folder, name, *arguments, **options)`, under a name of its own."""
        made = Trial(self._cluster, self._folder, f"job{next(numbers)}", *arguments, **options)
        self._made.append(made)
        return made

    def end(self) -> None:
        for made in self._made:
            made.end()


@pytest.fixture
def trial(cluster: LocalCluster, tmp_path: Path) -> Iterator[Trials]:
    trials = Trials(cluster, tmp_path)
    yield trials
    trials.end()
