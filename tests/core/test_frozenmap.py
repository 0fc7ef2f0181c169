import pickle
from copy import copy, deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core import FrozenMap

contents = st.dictionaries(st.text("abcé", max_size=4), st.integers(), max_size=6)


@given(contents, st.randoms(use_true_random=False))
def test_order_of_insertion_does_not_matter(content, random):
    shuffled = list(content.items())
    random.shuffle(shuffled)
    one, other = FrozenMap(content), FrozenMap(shuffled)
    assert one == other
    assert hash(one) == hash(other)
    assert list(one.items()) == list(other.items()) == sorted(content.items())
    assert repr(one) == repr(other)


@given(contents)
def test_it_reads_like_the_dict_it_was_made_from(content):
    frozen = FrozenMap(content)
    assert frozen == content
    assert dict(frozen) == content
    assert len(frozen) == len(content)
    assert all(key in frozen and frozen[key] == content[key] and frozen.get(key) == content[key] for key in content)
    assert bool(frozen) == bool(content)


@given(contents, contents)
def test_equal_exactly_when_the_contents_are(one, other):
    assert (FrozenMap(one) == FrozenMap(other)) == (one == other)


@given(contents, st.text("abcé", max_size=4), st.integers())
def test_changed_copies_leave_the_original_alone(content, key, value):
    frozen = FrozenMap(content)
    assert frozen.with_item(key, value) == {**content, key: value}
    assert list(frozen.with_item(key, value)) == sorted({*content, key})
    assert frozen.without(key) == {k: v for k, v in content.items() if k != key}
    assert frozen == content


@given(contents, st.data())
def test_other_values_for_some_of_its_keys(content, data):
    chosen = data.draw(st.lists(st.booleans(), min_size=len(content), max_size=len(content)))
    keys = [key for key, is_kept in zip(sorted(content), chosen, strict=True) if is_kept]
    found = FrozenMap(content).with_values(map(str, range(len(content))), chosen)
    assert list(found) == keys
    assert found == {key: str(sorted(content).index(key)) for key in keys}


@given(contents, contents)
def test_two_maps_become_one(one, other):
    both = FrozenMap(one).merged(FrozenMap(other), lambda mine, theirs: mine - theirs)
    assert both == {**one, **other, **{key: one[key] - other[key] for key in one.keys() & other.keys()}}
    assert list(both) == sorted({*one, *other})


@given(contents)
def test_pickle_and_copies_give_an_equal_map(content):
    frozen = FrozenMap(content)
    hash(frozen)
    for other in (pickle.loads(pickle.dumps(frozen)), copy(frozen), deepcopy(frozen), FrozenMap(frozen)):
        assert other == frozen
        assert hash(other) == hash(frozen)


def test_changing_the_source_does_not_change_the_map():
    source = {"a": 1}
    frozen = FrozenMap(source)
    source["a"] = 2
    assert frozen == {"a": 1}


def test_attempts_to_change_it_say_what_to_do_instead():
    frozen = FrozenMap({"a": 1})
    with pytest.raises(TypeError):
        frozen["a"] = 2
    with pytest.raises(AttributeError, match="with_item"):
        frozen._content = {}
    with pytest.raises(AttributeError, match="without"):
        del frozen._content


def test_it_differs_from_things_that_are_no_mapping():
    assert FrozenMap() != ()
    assert FrozenMap() == {}
