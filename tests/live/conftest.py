"""One cluster for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.live.cluster import LiveCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LiveCluster]:
    """Two nodes with two CPU slots each, under the policy pollux. Whatever a test leaves, this ends."""
    made = LiveCluster()
    try:
        yield made.start()
    finally:
        made.end()
