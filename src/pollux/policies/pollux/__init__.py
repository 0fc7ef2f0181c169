"""Pollux (Qiao et al., OSDI '21): GPUs to jobs so that the cluster's goodput is high and shared fairly.

`policy` is the seam's side. A snapshot becomes a `moment` (columns of all jobs), split by `gpu_types`; a `roster` adds
goodput, `values` what that is worth to the `objective`; a solver answers, and `emit` makes the plan. All but the values
is in `sharing`, for castor too. Solvers: `solver` (near the optimum, with a bound; the default) and `genetic` (the
paper's search).
"""
