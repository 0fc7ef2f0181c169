"""What holds for every file of tests here: no keeper outlives it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pollux.node import links, starting_keeper

from .daemons import until


@pytest.fixture(scope="module", autouse=True)
def every_keeper_has_ended() -> Iterator[None]:
    """A keeper that a client in this process has started, and its witness: they may be just about to end."""
    yield

    def have_ended() -> bool:
        starting_keeper.bury()
        return not starting_keeper._released

    until(have_ended)


@pytest.fixture
def nobody_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that tests speak for replicas stand when these end: their daemon does not wait for more words."""
    monkeypatch.setattr(links, "LAST_WORDS_S", 0.01)
