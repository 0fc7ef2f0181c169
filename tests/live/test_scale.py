"""Many nodes and many jobs on one machine: 32 emulated slots, each job through REST, and all of them succeed."""

from __future__ import annotations

import pytest
from benchmarks.scale import COMPRESS, ScaleResult, run_scale

from pollux.cli.fidelity.result import MAX_SLIP
from pollux.errors import PacingSlipped

from .paces import at_a_pace_it_can_keep

pytest.importorskip("torch")

NODES, SLOTS, JOBS = 4, 8, 16


@pytest.mark.slow
@pytest.mark.quiet
@pytest.mark.timeout(900)
def test_a_burst_of_jobs_trains_on_32_slots_of_4_nodes():
    said: list[str] = []

    def run(compress: float) -> ScaleResult:
        return run_scale(nodes=NODES, slots=SLOTS, jobs=JOBS, compress=compress, length=0.5, tell=said.append)

    def is_kept(result: ScaleResult) -> bool:
        """A slow or busy machine: the jobs fell behind their pace. How far they may is for `make bench` to say."""
        return result.pacing_slip < MAX_SLIP and not any(PacingSlipped.__name__ in fault for fault in result.faults)

    result = at_a_pace_it_can_keep(run, (COMPRESS, COMPRESS / 3, COMPRESS / 9), is_kept)
    assert result.faults == (), said
    assert (result.slots, result.succeeded) == (NODES * SLOTS, JOBS)
    assert result.most_jobs == JOBS, "each has at least one slot, as there are enough"
    assert result.most_slots >= JOBS
