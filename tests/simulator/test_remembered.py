"""The cache of interpolated step times: never wrong, never in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pollux.simulator.remembered import Key, Remembered, Times, cache_folder
from pollux.simulator.scenario import Scenario, simulate
from pollux.simulator.truth import truths_of_traces

KEY = (5, 20, 128)
TIMES = (0.1 + 0.2, 1e-17)  # floats that a careless writer would round


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("POLLUX_CACHE", str(folder))
    return folder


@pytest.fixture
def measurements(tmp_path: Path) -> list[Path]:
    file = tmp_path / "placements.csv"
    file.write_text("1,2,3")
    return [file]


def not_again(key: Key) -> Times:
    raise AssertionError(f"{key} was known")


def test_what_was_found_out_is_there_in_the_next_run_to_the_last_bit(cache: Path, measurements: list[Path]) -> None:
    first = Remembered(measurements)
    assert first.recall(KEY, lambda key: TIMES) == TIMES
    assert first.recall((16, 64, 4), lambda key: None) is None
    first.save()
    second = Remembered(measurements)
    assert second.recall(KEY, not_again) == TIMES
    assert second.recall((16, 64, 4), not_again) is None


def test_other_measurements_share_nothing(cache: Path, measurements: list[Path]) -> None:
    first = Remembered(measurements)
    first.recall(KEY, lambda key: TIMES)
    first.save()
    measurements[0].write_text("1,2,4")
    assert Remembered(measurements).recall(KEY, lambda key: (1.0, 0.5)) == (1.0, 0.5)


def test_two_runs_at_once_keep_what_both_found_out(cache: Path, measurements: list[Path]) -> None:
    one, other = Remembered(measurements), Remembered(measurements)
    one.recall(KEY, lambda key: TIMES)
    other.recall((6, 24, 8), lambda key: (2.0, 1.0))
    one.save()
    other.save()
    both = Remembered(measurements)
    assert both.recall(KEY, not_again) == TIMES
    assert both.recall((6, 24, 8), not_again) == (2.0, 1.0)


@pytest.mark.parametrize("damage", ["", "{", "[1]", '[[[5, 20, 128], ["x"]]]', "[[[5, 20], [1.0, 2.0]]]", "\0"])
def test_a_damaged_file_is_done_without_and_replaced(cache: Path, measurements: list[Path], damage: str) -> None:
    remembered = Remembered(measurements)
    remembered.recall(KEY, lambda key: TIMES)
    remembered.save()
    (file,) = cache.iterdir()
    file.write_text(damage)
    again = Remembered(measurements)
    assert again.recall(KEY, lambda key: TIMES) == TIMES
    again.save()
    assert Remembered(measurements).recall(KEY, not_again) == TIMES


def test_a_folder_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measurements: list[Path]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLLUX_CACHE", str(tmp_path / "file" / "below"))
    remembered = Remembered(measurements)
    remembered.recall(KEY, lambda key: TIMES)
    remembered.save()
    assert Remembered(measurements).recall(KEY, lambda key: (1.0, 0.5)) == (1.0, 0.5)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLLUX_CACHE", "")
    assert cache_folder() is None
    monkeypatch.delenv("POLLUX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "pollux"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "pollux"


@pytest.mark.data
def test_a_run_is_the_same_with_an_empty_a_full_and_no_cache(
    pollux_data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = pollux_data / "pollux-osdi21" / "traces"
    workload = str(pollux_data / "pollux-osdi21" / "workloads-0.5" / "workload-5.csv")
    runs = [simulate(Scenario(workload, "optimus", traces=traces)) for _ in range(2)]
    assert list(cache.iterdir())
    monkeypatch.setenv("POLLUX_CACHE", "")
    runs.append(simulate(Scenario(workload, "optimus", traces=traces)))
    assert runs[0].jobs == runs[1].jobs == runs[2].jobs


@pytest.mark.data
def test_with_a_full_cache_scipy_is_not_loaded(pollux_data: Path, cache: Path) -> None:
    traces = pollux_data / "pollux-osdi21" / "traces"
    (truth,) = truths_of_traces(traces, ["cifar10"]).values()
    truth.passes("t4", (4, 4, 4, 4, 4), 128)
    truth.save()
    script = (
        "import sys; from pathlib import Path; from pollux.simulator.truth import truths_of_traces\n"
        f"(truth,) = truths_of_traces(Path({str(traces)!r}), ['cifar10']).values()\n"
        "truth.passes('t4', (4, 4, 4, 4, 4), 128)\n"
        "assert 'scipy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ)
