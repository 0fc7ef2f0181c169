"""One cluster for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.live.cluster import LiveCluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[LiveCluster]:
    """Two nodes with two CPU slots each, under the policy pollux. Whatever a test leaves, this ends.

    A file that says `NODES = 1` has four slots on one node: a node takes seconds to start, each time again.
    """
    made = LiveCluster()
    try:
        yield made.start(getattr(request.module, "NODES", 2))
    finally:
        made.end()
