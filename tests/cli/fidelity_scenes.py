"""Courses and results of comparisons, hand-made."""

from pollux.cli.fidelity.course import Change, Course
from pollux.cli.fidelity.delays import Side, delays
from pollux.cli.fidelity.result import FidelityResult, Pair, Setting

SETTING = Setting("two", "pollux", 20.0, 2, 4, 60.0, 30.0)


def course(**changed):
    facts = {
        "submitted_at_s": 0.0,
        "finished_at_s": 1000.0,
        "reallocations": 1,
        "changes": (Change(10.0, 40.0, 1, 0), Change(100.0, 135.0, 4, 1)),
        "stopped_at_s": (),
        "batch_sizes": ((40.0, 128), (135.0, 512)),
        "pauses_s": (30.0,),
    }
    return Course(**{**facts, **changed})


def a_result(*pairs, **changed):
    pairs = pairs or (Pair("a", "cifar10:0.2", 2, course(), course()),)
    live, simulated = ([getattr(pair, side) for pair in pairs] for side in ("live", "simulated"))
    found = delays(Side([], live), Side([], simulated))
    return FidelityResult(SETTING, tuple(pairs), found, (0.0, 60.0), (0.0, 60.0), 50.0, **changed)
