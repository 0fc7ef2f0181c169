"""The simulator tells the truth about the live system: four emulated jobs, both ways."""

from __future__ import annotations

import pytest

from pollux.cli.fidelity.result import MAX_SLIP, TOO_BUSY, FidelityResult
from pollux.cli.fidelity.running import run_fidelity
from pollux.errors import PacingSlipped, Permanent

from .paces import at_a_pace_it_can_keep

pytest.importorskip("torch")

PACES = (30.0, 12.0, 5.0)
"""How often faster than real the workload runs. At the first it takes half a minute."""


def run(compress: float, said: list[str]) -> FidelityResult | None:
    """None: its jobs fell behind their pace."""
    try:
        return run_fidelity("four", compress=compress, tell=said.append)
    except Permanent as error:
        if PacingSlipped.__name__ not in str(error):
            raise
        return None


def is_kept(result: FidelityResult | None) -> bool:
    """Else the machine was busy throughout: starts and ends are late by real seconds, and each of these is many
    emulated ones where all goes quickly. Whether the bounds were met has no part in it."""
    return result is not None and result.pacing_slip < MAX_SLIP and (result.cpu_share or 0.0) <= TOO_BUSY


@pytest.mark.slow
@pytest.mark.quiet
@pytest.mark.timeout(1200)
def test_four_emulated_jobs_do_what_the_simulator_says():
    said: list[str] = []
    result = at_a_pace_it_can_keep(lambda compress: run(compress, said), PACES, is_kept)
    assert result is not None, said
    assert result.faults == (), said
    assert result.num_jobs == 4
    found = {job.name: (job.live.jct_s, job.simulated.jct_s, job.live.changes) for job in result.jobs}
    missed = [bound for bound in result.bounds if not bound.is_met]
    assert missed == [], (found, result.cpu_share)
    assert result.reallocations_live > 0
    for job in result.jobs:
        assert 1 <= len(job.live.changes) <= job.live.reallocations + 1 + len(job.live.stopped_at_s)
        assert job.live.batch_sizes
        assert job.live.reported_at_s
