"""Frozen data and the job life cycle: what every other room of Pollux talks about.

Pure: no input or output, no clock, no randomness, nothing but the standard library and `pollux.errors`.
"""

from pollux.core.actions import Action, MakePlan, ResizeJob, StartJob, StopJob, StopReason
from pollux.core.allocation import Allocation, Shape
from pollux.core.cluster import Cluster, Node
from pollux.core.codec import SCHEMA_VERSION, decode, dumps, encode, from_json, loads, register, to_json
from pollux.core.events import (
    Event,
    GenerationAbandoned,
    JobCancelled,
    JobFailed,
    JobFinished,
    JobPaused,
    JobRecovered,
    JobReported,
    JobRescaled,
    JobResumed,
    JobStopped,
    JobSubmitted,
    KindsImported,
    NodeDrained,
    NodeJoined,
    NodeLost,
    PlanMade,
    ReplicaLost,
    ReplicasReady,
    RoundDue,
)
from pollux.core.frozenmap import FrozenMap
from pollux.core.ids import DEFAULT_GPU_TYPE, JobId, NodeId
from pollux.core.job import Basis, Job, JobSpec
from pollux.core.kinds import GradientSums, KindProfile, ProfileRegistry, Tally, kind_of
from pollux.core.message import OfGeneration
from pollux.core.model import BatchLimits, BatchWishes, GradientStats, JobModel, Progress, ThroughputFit
from pollux.core.phase import TRANSITIONS, Phase, Trigger, next_phase
from pollux.core.plan import Oracle, Plan, Snapshot
from pollux.core.profile import Observation, ObservationKey, Profile

__all__ = [
    "DEFAULT_GPU_TYPE",
    "SCHEMA_VERSION",
    "TRANSITIONS",
    "Action",
    "Allocation",
    "Basis",
    "BatchLimits",
    "BatchWishes",
    "Cluster",
    "Event",
    "FrozenMap",
    "GenerationAbandoned",
    "GradientStats",
    "GradientSums",
    "Job",
    "JobCancelled",
    "JobFailed",
    "JobFinished",
    "JobId",
    "JobModel",
    "JobPaused",
    "JobRecovered",
    "JobReported",
    "JobRescaled",
    "JobResumed",
    "JobSpec",
    "JobStopped",
    "JobSubmitted",
    "KindProfile",
    "KindsImported",
    "MakePlan",
    "Node",
    "NodeDrained",
    "NodeId",
    "NodeJoined",
    "NodeLost",
    "Observation",
    "ObservationKey",
    "OfGeneration",
    "Oracle",
    "Phase",
    "Plan",
    "PlanMade",
    "Profile",
    "ProfileRegistry",
    "Progress",
    "ReplicaLost",
    "ReplicasReady",
    "ResizeJob",
    "RoundDue",
    "Shape",
    "Snapshot",
    "StartJob",
    "StopJob",
    "StopReason",
    "Tally",
    "ThroughputFit",
    "Trigger",
    "decode",
    "dumps",
    "encode",
    "from_json",
    "kind_of",
    "loads",
    "next_phase",
    "register",
    "to_json",
]
