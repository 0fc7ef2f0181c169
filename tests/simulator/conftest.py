"""What tests of the virtual world share."""

from __future__ import annotations

import pytest

from pollux.scheduler import Scheduler
from pollux.scheduler.invariants import violations


@pytest.fixture
def invariants_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at after every event."""
    handle = Scheduler.handle

    def checked(self, event, now):
        actions = handle(self, event, now)
        assert violations(self.state) == [], f"after {event}"
        return actions

    monkeypatch.setattr(Scheduler, "handle", checked)
