"""Which (m, s) are tried: always inside the limits, few, no two of the same total, shared and read-only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from pollux.core import BatchLimits
from pollux.goodput import PUBLISHED_BATCH, BatchOptions
from pollux.goodput.candidates import FEW, candidates

from .strategies import batch_options, every_config, limits, log_integers


@given(log_integers(1, 64), limits(), batch_options)
def test_candidates_are_some_of_all_configurations_and_empty_only_if_there_are_none(K, box, options):
    choice = candidates(K, box, options)
    m, s = every_config(K, box, options)
    tried = set(zip(choice.m.tolist(), choice.s.tolist(), strict=True))
    assert tried <= set(zip(m.tolist(), s.tolist(), strict=True))
    assert bool(tried) == bool(len(m))


@given(log_integers(1, 64), limits(), batch_options)
def test_no_two_candidates_have_the_same_total_batch_size_and_the_share_is_right(K, box, options):
    choice = candidates(K, box, options)
    total = K * choice.m * (choice.s + 1)
    assert len(set(total.tolist())) == len(total)
    np.testing.assert_allclose(choice.initial_share * total, box.initial_batch_size, rtol=1e-12)


@given(log_integers(1, 64), limits())
def test_where_configurations_are_few_every_total_batch_size_is_tried_with_the_fewest_passes(K, box):
    m, s = every_config(K, box, BatchOptions())
    if len(m) <= FEW:
        fewest = {}
        for size, extra in sorted(zip(m.tolist(), s.tolist(), strict=True), key=lambda pair: pair[1]):
            fewest.setdefault(size * (extra + 1), (size, extra))
        choice = candidates(K, box)
        assert set(zip(choice.m.tolist(), choice.s.tolist(), strict=True)) == set(fewest.values())


@given(log_integers(1, 64), limits())
def test_candidates_are_few_beside_all_configurations(K, box):
    # Two ends, a factor of 1.06 between neighbours, up to 2,000 examples a GPU and 150 × M0 in all.
    assert len(candidates(K, box).m) <= 600


def test_candidates_are_made_once_and_cannot_be_changed():
    box = BatchLimits(128, 4096, 32, 1024)
    choice = candidates(4, box)
    assert candidates(4, BatchLimits(128, 4096, 32, 1024)) is choice
    with pytest.raises(ValueError, match="read-only"):
        choice.m[0] = 1.0


def test_the_published_grid_has_at_most_50_sizes_and_obeys_the_one_gpu_rule():
    choice = candidates(1, BatchLimits(128, 4096, 32, 1024), PUBLISHED_BATCH)
    assert 0 < len(choice.m) <= 50
    assert ((choice.s >= 1) == (choice.m * (choice.s + 1) > 128)).all()
    assert len(candidates(5, BatchLimits(100, 400, 100, 100), PUBLISHED_BATCH).m) == 0
