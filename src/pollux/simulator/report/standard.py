"""The sections that every report has: what the outcomes of simulations can tell by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pollux.simulator.metrics import Outcome, means
from pollux.simulator.report.history_figures import adaptive_jobs, coadaptation_figure, gpus_figure, most_adaptive
from pollux.simulator.report.line_figures import cluster_figures, jct_figure, rho_figure
from pollux.simulator.report.page import Markup, Picture, Section
from pollux.simulator.report.samples import CURVES, by_policy, first_workload, has_histories, nice_bin_s
from pollux.simulator.report.style import VARIABLES, colours
from pollux.simulator.report.tables import figures_table, inputs_table, jobs_tables, time_unit

MAX_PANELS = 8
"""Policies whose GPUs are drawn job by job."""


def summary_section(outcomes: Sequence[Outcome]) -> Section:
    """Who was quickest, at one glance, and all figures below."""
    workloads = {outcome.workload for outcome in outcomes}
    text = f"{len(outcomes):,} runs; means over {len(workloads)} workloads." if len(workloads) > 1 else ""
    return Section("Summary", [text, _bars(outcomes)], tables=[figures_table(outcomes)])


def _bars(outcomes: Sequence[Outcome]) -> Markup:
    """Average job completion time of each policy, as bars that begin at zero."""
    unit, unit_s = time_unit(outcomes)
    averages = {policy: float(figures["avg_jct_s"] or 0.0) for policy, figures in means(outcomes).items()}
    longest = max(averages.values()) or 1.0
    of_policy = colours(averages)
    bars = "".join(
        f'<span class="name">{escape(policy)}</span><span class="bar"><i style="width:{100 * average / longest:.2f}%;'
        f'background:var(--{VARIABLES[of_policy[policy]]})"></i></span>'
        f'<span class="n">{average / unit_s:.2f} {unit}</span>'
        for policy, average in averages.items()
    )
    return Markup(f'<p class="quiet">Average job completion time</p><div class="bars">{bars}</div>')


def times_section(outcomes: Sequence[Outcome]) -> Section:
    """How long jobs took, and whether anybody paid for it."""
    policies = ", ".join(by_policy(outcomes))
    pictures = [
        Picture(
            "jct",
            jct_figure(outcomes),
            f"Share of jobs that ended within a time, on a logarithmic axis, under {policies}.",
            "Share of jobs that had ended within a time after their submission. Left is better.",
        )
    ]
    if any(outcome.fairness is not None for outcome in outcomes):
        pictures.append(
            Picture(
                "rho",
                rho_figure(outcomes),
                f"Share of jobs with at most some finish-time fairness ρ under {policies}; a line marks 1.",
                "ρ is a job's completion time over the one it would have had alone on its fair share of the cluster. "
                "Jobs right of the line lost by sharing.",
            )
        )
    return Section("Job completion times", figures=pictures)


def gpus_section(outcomes: Sequence[Outcome]) -> Section | None:
    """Who held the GPUs; None without histories."""
    shown = [outcome for outcome in first_workload(outcomes) if outcome.histories][:MAX_PANELS]
    if not shown:
        return None
    policies = ", ".join(outcome.policy for outcome in shown)
    caption = "Each band is one job, as high as it has GPUs; the line on top is the size of the cluster."
    alt = f"GPUs held by each job over time, stacked and coloured by application, under {policies}."
    return Section("GPUs by job", _of_first(outcomes), [Picture("gpus-by-job", gpus_figure(shown), alt, caption)])


def cluster_section(outcomes: Sequence[Outcome]) -> Section:
    """The cluster in time, policies over each other."""
    shown = first_workload(outcomes)
    text = f"{_rule(shown)} Examples of all applications are added up: those with many small ones weigh most in "
    text += "throughput and goodput."
    pictures = [
        Picture(f"cluster-{name}", figure, f"{title} ({unit}) over time, a line a policy.", is_small=True)
        for (name, figure), (title, unit, _) in zip(cluster_figures(shown).items(), CURVES.values(), strict=True)
    ]
    return Section("Cluster", [*_of_first(outcomes), text], pictures)


def _rule(outcomes: Sequence[Outcome]) -> str:
    """What the curves of the cluster are means of."""
    minutes = f"{nice_bin_s(outcomes) / 60:g} minutes"
    if not has_histories(outcomes):
        return f"Means, over {minutes} each, of what was true right after each round."
    rule = f"Means over {minutes}. Efficiency, goodput and throughput of a job are looked at right after each round: "
    return rule + "one that has just been moved counts without goodput and throughput up to the next."


def coadaptation_section(outcomes: Sequence[Outcome]) -> Section | None:
    """Jobs that a policy adapted; None where none did."""
    pictures = coadaptation_pictures(first_workload(outcomes), "coadaptation")
    if not pictures:
        return None
    text = "The jobs of two applications with the most GPU-hours, under the policies that adapt jobs. "
    text += "Noise grows as training goes on, so larger batches lose less efficiency, and more GPUs are of use."
    return Section("Co-adaptation", [*_of_first(outcomes), text], pictures)


def coadaptation_pictures(outcomes: Sequence[Outcome], name: str) -> list[Picture]:
    """`name-1` and so on: jobs of one workload that a policy adapted; none where none did."""
    chosen = most_adaptive(outcomes)
    if chosen is None:
        return []
    return [
        Picture(
            f"{name}-{index + 1}",
            coadaptation_figure(outcomes, job.name),
            f"GPUs, batch size and statistical efficiency of job {job.name} over time.",
            f"{job.application or job.name} of {chosen.workload}: {job.gpu_s / 3600:.1f} GPU-hours under "
            f"{chosen.policy}.",
            is_small=True,
        )
        for index, job in enumerate(adaptive_jobs(outcomes))
    ]


def jobs_section(outcomes: Sequence[Outcome]) -> Section:
    tables = jobs_tables(outcomes)
    text = "Click a heading to sort, a strip to see GPUs, batch size and efficiency of that job from submission to end."
    if len(tables) < len(outcomes):
        text += f" The first {len(tables)} of {len(outcomes)} runs are shown; report.json has all."
    return Section("Jobs", text, tables=tables)


def inputs_section(outcomes: Sequence[Outcome]) -> Section:
    return Section("Inputs", "What the runs came from.", tables=[inputs_table(outcomes)])


def _of_first(outcomes: Sequence[Outcome]) -> list[str]:
    """Say so where several workloads were run and one is shown."""
    several = len({outcome.workload for outcome in outcomes}) > 1
    return [f"Of the first workload, {outcomes[0].workload}."] if several else []
