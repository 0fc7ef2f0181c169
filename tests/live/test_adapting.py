"""Jobs that share a cluster: who trains on what follows who is there, and training does not notice."""

from __future__ import annotations

import pytest
from tests.live.cluster import LiveCluster
from tests.live.course import BATCH, TARGET, Course

pytestmark = pytest.mark.timeout(400)


def assert_never_began_again(cluster: LiveCluster, course: Course) -> None:
    kinds = cluster.kinds(course.job)
    assert kinds.count("TrainingStarted") == 1
    assert not {"TrainingResumed", "JobFailed", "JobStopped", "GenerationAbandoned"} & set(kinds)


def test_gpus_move_between_jobs_that_train_and_batch_sizes_follow(cluster: LiveCluster) -> None:
    first = cluster.train("first", "--passes", 40)
    cluster.wait_gpus(first.job, lambda gpus: gpus >= 3)
    second = cluster.train("second", "--passes", 12, options=("--min-gpus", 2, "--max-gpus", 2))
    third = cluster.train("third", "--passes", 12, options=("--max-gpus", 1))
    cluster.wait_gpus(second.job, lambda gpus: gpus == 2)
    cluster.wait_gpus(third.job, lambda gpus: gpus == 1)
    shrunk = cluster.wait_gpus(first.job, lambda gpus: gpus == 1)
    cluster.wait_step(first, first.last_step + 5)
    for course in (second, third):
        cluster.succeed(course)
    grown = cluster.wait_gpus(first.job, lambda gpus: gpus >= 3)
    cluster.wait_step(first, first.last_step + 5)
    cluster.succeed(first)

    assert grown.generation > shrunk.generation
    assert first.sizes[0] == 1
    assert max(first.sizes) >= 3
    assert first.sizes.index(max(first.sizes)) < len(first.sizes) - 1 - first.sizes[::-1].index(1) < len(first.sizes) - 1
    assert second.sizes == [2]
    assert third.sizes == [1]
    for course, passes in ((first, 40), (second, 12), (third, 12)):
        assert_never_began_again(cluster, course)
        course.assert_each_step_once()
        course.assert_learning_rate_follows()
        course.assert_used_once_a_pass(passes)
        assert course.accuracy(cluster.folder) >= TARGET
    batches = {record["batch"] for record in first.records()}
    assert max(batches) >= 2 * BATCH
    kinds = cluster.kinds(first.job)
    assert kinds.count("ReplicasChanged") >= 3
    assert "BatchChanged" in kinds
    assert "LearningRateChanged" in kinds
