"""The figures of the benchmark of the live service, from made-up runs: nothing is started or timed."""

from __future__ import annotations

from benchmarks.areas import service


def test_a_start_is_the_median_of_those_after_the_first():
    made = service.started(2.0, [0.4, 0.6, 0.5])
    assert (made.key, made.value, made.bound) == ("service.submit_to_running_s", 0.5, 1.0)
    assert "2.00 for a script that is new" in made.note


def test_a_recovery_is_the_median():
    made = service.recovered([3.0, 1.0, 2.0])
    assert (made.key, made.value) == ("service.recovery_s", 2.0)


def test_what_it_yields_are_its_keys():
    assert (service.started(1.0, [1.0]).key, service.recovered([1.0]).key) == service.KEYS
