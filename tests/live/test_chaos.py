"""A short campaign: one fault of each sort, fixed, on a live cluster. The long one is `make bench ONLY=faults`."""

from __future__ import annotations

import pytest

from pollux.testing.chaos import FAULTS, LocalBed, chosen, run_campaign
from pollux.testing.chaos.report import summary

pytest.importorskip("torch")

SHORT = (
    *("kill-service", "kill-planner", "kill-daemon", "kill-keeper", "kill-replica", "kill-job", "kill-node"),
    *("stop-service-briefly", "stop-daemon-briefly", "stop-replica-briefly", "power-cut", "damaged-checkpoint"),
    *("damaged-log-tail", "emptied-log", "restored-log", "full-disk", "lost-token", "lost-service-file"),
    *("taken-port", "nonsense-agent"),
)
SEED = 20


@pytest.mark.slow
@pytest.mark.quiet
@pytest.mark.timeout(400)
def test_nothing_is_lost_doubled_or_left_behind_whatever_falls():
    assert set(SHORT) <= set(FAULTS)
    said: list[str] = []
    result = run_campaign(LocalBed(), SEED, chosen(SHORT), most_faults=len(SHORT), say=said.append)
    assert not result.violations, "\n".join([*said, summary([result])])
    assert set(SHORT) <= {*result.injected, *result.skipped}
    assert result.jobs["succeeded"] > 0
