"""The store of blocks: no two overlap, nothing moves, little is wasted."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.goodput.segments import SEGMENT, SPARE, Segments

sizes = st.sampled_from([8, 1000, SPARE - 1, SPARE, SPARE + 1, SEGMENT // 3, SEGMENT, SEGMENT + 1, 3 * SEGMENT - 1])


def filled(store: Segments, at: int, size: int, number: float) -> None:
    store.block(at, size)[:] = number


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(sizes, st.booleans(), st.booleans()), max_size=30))
def test_blocks_keep_what_is_written_to_them(steps):
    store, blocks = Segments(), {}
    for number, (size, frees, tidies) in enumerate(steps):
        if frees and blocks:
            at, (length, _) = blocks.popitem()
            store.free(at, length)
        at = store.take(size)
        assert at not in blocks
        filled(store, at, size, number)
        blocks[at] = size, number
        if tidies and (wasted := store.wasted()):
            content = store.give_up(wasted)
            for before in [at for at in blocks if at in wasted]:
                length, known = blocks.pop(before)
                assert (content[before - wasted.start :][:length] == known).all()
                at = store.take(length)
                filled(store, at, length, known)
                blocks[at] = length, known
    for at, (size, number) in blocks.items():
        assert len(store.block(at, size)) == size
        assert (store.block(at, size) == number).all()
    found = {}
    addresses = np.array([-1, *blocks])
    for array, begin, chosen in store.by_segment(addresses):
        for index in chosen.tolist():
            found[int(addresses[index])] = array[addresses[index] - begin]
    assert found == {at: number for at, (_, number) in blocks.items()}


def test_what_was_freed_is_taken_again():
    store = Segments()
    blocks = [store.take(1000) for _ in range(100)]
    size = store.size
    for at in blocks:
        store.free(at, 1000)
    assert {store.take(1000) for _ in range(100)} == set(blocks)
    assert store.size == size


def test_segments_that_are_mostly_garbage_are_given_up_and_their_place_is_used_again():
    store = Segments()
    blocks = [store.take(SEGMENT // 2) for _ in range(12)]
    for at in blocks[:8]:
        store.free(at, SEGMENT // 2)
    size = store.size
    while wasted := store.wasted():
        assert not any(at in wasted for at in blocks[8:])
        store.give_up(wasted)
    assert store.size < 0.5 * size
    more = [store.take(SEGMENT // 2) for _ in range(8)]
    assert store.size <= size
    assert max(more) <= max(blocks)


def test_few_blocks_take_little_memory():
    store = Segments()
    store.take(100)
    assert sum(array.nbytes for array, _, _ in store.by_segment(np.array([0]))) == 8 * SPARE
    assert not store.wasted()
