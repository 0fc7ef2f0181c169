"""Small workloads that are listed job by job, for two nodes of four GPUs: what an emulated cluster runs in minutes.

GPUs and batch sizes are what owners might guess; policies that adapt jobs do not look at them. Times and lengths were
chosen so that little depends on single moments: let jobs come 20 s sooner or later, be 3 % longer or shorter and take
some seconds more to start, and under Pollux average completion times differ by 2 %, numbers of re-allocations by 10 %.
"""

from __future__ import annotations

from pollux.simulator.workload import WorkloadJob

FOUR = (
    WorkloadJob("bert", 0.0, "bert:0.16", 2, 24),
    WorkloadJob("cifar10", 30.0, "cifar10:0.16", 2, 256),
    WorkloadJob("ncf", 140.0, "ncf:5.2", 1, 2048),
    WorkloadJob("deepspeech2", 270.0, "deepspeech2:0.063", 2, 80),
)

SIX = (
    WorkloadJob("bert", 0.0, "bert:0.22", 1, 12),
    WorkloadJob("yolov3", 75.0, "yolov3:0.15", 4, 32),
    WorkloadJob("cifar10", 590.0, "cifar10:0.34", 1, 128),
    WorkloadJob("ncf", 720.0, "ncf:9.5", 1, 2048),
    WorkloadJob("deepspeech2", 750.0, "deepspeech2:0.04", 1, 40),
    WorkloadJob("imagenet", 1020.0, "imagenet:0.004", 2, 400),
)

TWELVE = (
    WorkloadJob("ncf-1", 0.0, "ncf:25", 1, 4096),
    WorkloadJob("cifar10-1", 400.0, "cifar10:0.47", 2, 256),
    WorkloadJob("ncf-2", 1480.0, "ncf:26", 1, 4096),
    WorkloadJob("bert-1", 1500.0, "bert:0.6", 2, 24),
    WorkloadJob("deepspeech2-1", 2190.0, "deepspeech2:0.44", 4, 160),
    WorkloadJob("deepspeech2-2", 2900.0, "deepspeech2:0.14", 2, 80),
    WorkloadJob("cifar10-2", 3180.0, "cifar10:1.5", 4, 512),
    WorkloadJob("imagenet-1", 4150.0, "imagenet:0.019", 4, 800),
    WorkloadJob("yolov3-1", 4680.0, "yolov3:0.1", 2, 16),
    WorkloadJob("bert-2", 5600.0, "bert:0.95", 4, 48),
    WorkloadJob("yolov3-2", 6800.0, "yolov3:0.09", 4, 64),
    WorkloadJob("imagenet-2", 6900.0, "imagenet:0.0085", 4, 800),
)
