"""Pollux (Qiao et al., OSDI '21): GPUs to jobs so that the cluster's goodput is high and shared fairly.

`policy` is the seam's side; a round becomes a `problem`, judged by an `objective`, and a solver behind `solver` answers
it: `packed` (fast, deterministic, the default) or `genetic` (the paper's search).
"""
