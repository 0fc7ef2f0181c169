"""The arena of envelopes, against tables made afresh."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.core import BatchLimits, GradientStats, Shape
from pollux.goodput import PAPER, RACKS, BatchOptions, GoodputModel, ShapeSet, ThroughputModel, envelope_kernel, tables
from pollux.goodput.efficiency import shares
from pollux.goodput.envelope import Arena, Slot, Spans
from pollux.goodput.segments import SPARE

from .strategies import ONLY_NOISE, batch_options, gradients, limits, rack_thetas, thetas

BOXES = st.sampled_from([BatchLimits(128, 4096, 32, 1024), BatchLimits(8, 64, 4, 8), BatchLimits(1, 40, 1, 1)])
OPTIONS = st.just(BatchOptions()) | batch_options
SPANS = Spans(((1, 4, 0.0), (2, 9, 1.0), (3, 2, 1.0)))
"""One node, several nodes, and a class that nobody has so many GPUs for."""
NARROW = Spans(((1, 2, 0.0), (2, 3, 1.0), (3, 2, 1.0)))
"""The first cells of it."""
SHAPES = [Shape(K) for K in range(1, 5)] + [Shape(K, 2) for K in range(2, 10)]


class ByTheNode(ThroughputModel):
    """One of the user's own: every further node costs the same."""

    name = "ours"
    parameters = ("start", "per_example", "per_node")
    upper = (np.inf,) * 3

    def t_grad(self, theta, m):
        return theta[0] + theta[1] * m

    def t_step(self, theta, K, level, m):
        return self.t_grad(theta, m) + theta[2] * (level - 1)

    def starts(self, seen):
        raise NotImplementedError


jobs = st.builds(GoodputModel, st.just(PAPER), thetas, gradients, BOXES | limits(), OPTIONS)
jobs |= st.builds(GoodputModel, st.just(RACKS), rack_thetas, gradients, BOXES, OPTIONS)


def added(arena: Arena, job: GoodputModel, spans: Spans = SPANS) -> Slot:
    return arena.add(job.model, job.theta, job.limits, job.options, spans)


def searched(arena: Arena, slots, models, spans: Spans = SPANS, most: int = 9):
    """Goodput [J, cells] in the order of `SHAPES`."""
    classes = len(spans.of)
    first = np.arange(len(models) + 1) * classes * (most + 1)
    found = np.zeros(int(first[-1]))
    noise = np.array([float(shares(job.gradient.sqr, job.gradient.var)[1]) for job in models])
    initial = np.array([job.limits.initial_batch_size for job in models])
    at = np.array([slot.at for slot in slots])
    arena.search(at, noise, initial, np.full(len(models), most), classes, first, found)
    found = found.reshape(len(models), classes, most + 1)
    cells = [(c, K) for c, (low, high, _) in enumerate(spans.of) for K in range(low, min(high, most) + 1)]
    rest = found.copy()
    rest[:, [c for c, _ in cells], [K for _, K in cells]] = 0.0
    assert not rest.any(), "what a block does not have is left alone"
    return found[:, [c for c, _ in cells], [K for _, K in cells]]


@settings(max_examples=25)
@given(st.lists(jobs, min_size=1, max_size=4), st.data())
def test_it_gives_the_tables_for_any_gradients(models, data):
    arena = Arena()
    slots = [added(arena, job) for job in models]
    for _ in range(3):
        models = [job.with_gradient(data.draw(gradients)) for job in models]
        expected = tables(models, ShapeSet.of(SHAPES)).goodput
        np.testing.assert_allclose(searched(arena, slots, models), expected, rtol=1e-12, atol=0.0)


@settings(max_examples=25)
@given(jobs, st.integers(1, 4), st.integers(1, 9))
def test_a_wider_one_is_the_same_as_one_made_afresh(job, one_node, many):
    narrow = Spans(((1, one_node, 0.0), (2, many, 1.0), (3, 2, 1.0)))
    arena, other = Arena(), Arena()
    before = added(arena, job, narrow)
    searched(arena, [before], [job], narrow)
    (wide,) = arena.widen_all([before], SPANS)
    np.testing.assert_array_equal(searched(arena, [wide], [job]), searched(other, [added(other, job)], [job]))
    assert wide.length == added(other, job).length


def test_one_of_other_levels_is_made_anew():
    job = GoodputModel(PAPER, (0.05, 0.001, 0.02, 0.001, 0.1, 0.005, 1.7), ONLY_NOISE, BatchLimits(128, 4096, 32, 1024))
    for spans in (
        Spans(((1, 4, 0.0), (2, 9, 0.0), (3, 2, 0.0))),
        Spans(((1, 4, 0.0), (2, 9, 1.0))),
        Spans(((1, 1, 0.0), (2, 9, 1.0), (3, 2, 1.0))),
        Spans(((2, 4, 0.0), (2, 9, 1.0), (3, 2, 1.0))),
    ):
        arena, other = Arena(), Arena()
        (found,) = arena.widen_all([added(arena, job, NARROW)], spans)
        expected = searched(other, [added(other, job, spans)], [job], spans)
        np.testing.assert_array_equal(searched(arena, [found], [job], spans), expected)


def test_it_follows_the_noise_up_and_down():
    job = GoodputModel(PAPER, (0.05, 0.001, 0.02, 0.001, 0.1, 0.005, 1.7), ONLY_NOISE, BatchLimits(128, 4096, 32, 1024))
    arena = Arena()
    slot = added(arena, job)
    noise = np.geomspace(1e-3, 1e4, 60)
    for var in [*noise, *noise[::-1], *np.random.default_rng(0).permutation(noise)]:
        changed = job.with_gradient(GradientStats(1.0, float(var)))
        expected = tables([changed], ShapeSet.of(SHAPES)).goodput
        np.testing.assert_allclose(searched(arena, [slot], [changed]), expected, rtol=1e-12)


def test_models_of_the_users_own_have_envelopes_too():
    job = GoodputModel(ByTheNode(), (0.05, 0.001, 0.02), GradientStats(1.0, 3.0), BatchLimits(128, 4096, 32, 1024))
    spans = Spans(((1, 4, 1.0), (2, 9, 2.0), (3, 2, 3.0)))
    arena = Arena()
    expected = tables([job], ShapeSet.of(SHAPES)).goodput
    np.testing.assert_allclose(searched(arena, [added(arena, job, spans)], [job], spans), expected, rtol=1e-12)


def test_plain_python_gives_the_same(monkeypatch):
    job = GoodputModel(PAPER, (0.05, 0.001, 0.02, 0.001, 0.1, 0.005, 1.7), ONLY_NOISE, BatchLimits(128, 4096, 32, 1024))
    first, second = Arena(), Arena()
    expected = searched(first, [added(first, job)], [job])
    for name, function in list(vars(envelope_kernel).items()):
        if hasattr(function, "py_func"):
            monkeypatch.setattr(envelope_kernel, name, function.py_func)
    for name in ("fill_blocks", "join_blocks", "search_blocks"):
        monkeypatch.setattr(f"pollux.goodput.envelope.{name}", getattr(envelope_kernel, name))
    np.testing.assert_array_equal(searched(second, [added(second, job)], [job]), expected)
    (wide,) = second.widen_all([added(second, job, NARROW)], SPANS)
    np.testing.assert_array_equal(searched(second, [wide], [job]), expected)


class TestArena:
    def models(self, count: int, seed: int = 0) -> list[GoodputModel]:
        rng = np.random.default_rng(seed)
        return [
            GoodputModel(
                PAPER, (*rng.uniform(0.01, 0.1, 6).tolist(), 1.5), ONLY_NOISE, BatchLimits(128, 4096, 32, 1024)
            )
            for _ in range(count)
        ]

    def test_equal_jobs_share_a_slot_until_the_last_is_gone(self):
        arena, (job,) = Arena(), self.models(1)
        slot = added(arena, job)
        assert added(arena, job.with_gradient(GradientStats(1.0, 2.0))) is slot
        arena.release(slot)
        assert len(arena) == 1
        arena.release(slot)
        assert len(arena) == 0
        assert added(arena, job) is not slot

    def test_other_spans_need_another_slot(self):
        arena, (job,) = Arena(), self.models(1)
        assert added(arena, job) is not added(arena, job, Spans(((1, 4, 0.0), (2, 8, 1.0))))

    def test_freed_blocks_are_used_again(self):
        arena, models = Arena(), self.models(64)
        slots = [added(arena, job) for job in models]
        size = arena.size
        for _ in range(3):
            for slot in slots:
                arena.release(slot)
            slots = [added(arena, job) for job in models]
        assert arena.size == size

    def test_many_are_added_as_one_by_one(self):
        first, second, models = Arena(), Arena(), self.models(64)
        models += models[:3]
        one = models[0]
        together = first.add_all(one.model, [job.theta for job in models], one.limits, one.options, SPANS)
        slots = [added(second, job) for job in models]
        assert [(slot.at, slot.length, slot.users) for slot in together] == [
            (slot.at, slot.length, slot.users) for slot in slots
        ]
        np.testing.assert_array_equal(searched(first, together, models), searched(second, slots, models))

    def test_what_is_there_stays_in_its_place_when_it_grows(self):
        arena, models = Arena(), self.models(240)
        slots = [added(arena, job) for job in models]
        assert arena.size > 2 * SPARE
        again = [added(arena, job) for job in models]
        assert [slot.at for slot in again] == [slot.at for slot in slots]
        np.testing.assert_allclose(
            searched(arena, slots, models), tables(models, ShapeSet.of(SHAPES)).goodput, rtol=1e-12
        )

    def test_it_is_tidied_up_until_no_more_than_half_is_garbage(self):
        arena, models = Arena(), self.models(240)
        slots = [added(arena, job) for job in models]
        before = searched(arena, slots, models)
        assert not arena.tidy()
        for slot in slots[: len(slots) * 2 // 3]:
            arena.release(slot)
        kept, size = slots[len(slots) * 2 // 3 :], arena.size
        while moved := arena.tidy():
            assert not any(slot.at in moved for slot in kept)
        assert arena.size <= max(0.5 * size, SPARE)
        models = models[-len(kept) :]
        np.testing.assert_array_equal(searched(arena, kept, models), before[-len(kept) :])
        more = self.models(80, seed=1)
        slots = [added(arena, job) for job in more]
        np.testing.assert_allclose(
            searched(arena, slots + kept, more + models), tables(more + models, ShapeSet.of(SHAPES)).goodput, rtol=1e-12
        )
