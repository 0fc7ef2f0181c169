"""Job lists of real clusters, and the way from one of them to a workload.

from pollux.simulator.importers import ReplayOptions, read_log, replay

replay(read_log(Path("cluster_log.csv")), ReplayOptions(consecutive=True)).workload
"""

from pollux.simulator.importers.formats import FORMATS, Format, read_log
from pollux.simulator.importers.job_list import JobList, LoggedJob, PassedOver
from pollux.simulator.importers.replay import CATEGORIES, Category, Replay, ReplayOptions, category_of, replay

__all__ = [
    "CATEGORIES",
    "FORMATS",
    "Category",
    "Format",
    "JobList",
    "LoggedJob",
    "PassedOver",
    "Replay",
    "ReplayOptions",
    "category_of",
    "read_log",
    "replay",
]
