"""Studies: what is run, that it is run once, and what comes out beside what was published."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest

from pollux.core import Cluster, FrozenMap
from pollux.errors import InvalidDocument, InvalidInput, UnknownName
from pollux.simulator.cluster_file import ClusterFile
from pollux.simulator.compat import options_of
from pollux.simulator.generator import GeneratorOptions, built_in_workload
from pollux.simulator.report import render
from pollux.simulator.scenario import Scenario, simulate
from pollux.simulator.studies.cases import Case, distinct, run_cases
from pollux.simulator.studies.claims import UNAVOIDED_GENETIC, Claim, claims_of, verdict
from pollux.simulator.studies.loads import scaled
from pollux.simulator.studies.paper import GENETIC_NOT_AVOIDING, PARTS, World, parts_of
from pollux.simulator.studies.paper_page import paper_sections
from pollux.simulator.studies.published import read_results
from pollux.simulator.studies.samples import GeneratedSamples, generated_samples, paper_samples
from pollux.simulator.studies.sweep import AXES, Plan, axis_of, cases_of, rows_of, values_of
from pollux.simulator.workload import Workload, WorkloadJob

SMALL = Workload("small", (WorkloadJob("a", 0.0, "ncf", 1, 256), WorkloadJob("b", 30.0, "cifar10", 2, 512)))
TWO_NODES = ClusterFile(Cluster.uniform(2, 2, "t4"))
TINY = GeneratedSamples(
    ["tiny-1", "tiny-2"],
    GeneratorOptions(num_jobs=2, duration_s=200.0, seed=1, mix=FrozenMap({"ncf": 1.0}), max_gpus=4),
    TWO_NODES,
)


def small(policy: str, settings: dict | None = None, **more: object) -> Scenario:
    options = options_of([policy], settings or {})[policy]
    return Scenario("small", policy, TWO_NODES, options=options, content=SMALL, **more)


def quiet(amount: float) -> None:
    pass


class TestScenariosWithTheirOwnJobs:
    def test_run_like_those_of_files_and_names(self):
        named = simulate(Scenario("demo", "fifo"))
        given = simulate(Scenario("demo", "fifo", content=built_in_workload("demo")))
        assert given.jobs == named.jobs
        assert given.inputs == named.inputs

    def test_go_to_other_processes(self):
        scenario = small("fifo")
        assert pickle.loads(pickle.dumps(scenario)) == scenario

    def test_are_checked_like_any_other(self):
        with pytest.raises(InvalidDocument, match="more GPUs than the 1 of the cluster"):
            simulate(replace(small("fifo"), cluster=ClusterFile(Cluster.uniform(1, 1, "t4"))))


class TestCases:
    def test_the_same_run_is_done_once(self):
        cases = [
            Case("usual", (small("pollux"),)),
            Case("fair", (small("pollux", fairness=True),)),
            Case("p", (small("pollux", {"policy.p": -1}), small("pollux", {"policy.p": 1}))),
            Case("seen", (small("pollux", histories=True),)),
        ]
        found = distinct(cases)
        assert [(it.fairness, it.histories, dict(it.options.policy)) for it in found] == [
            (True, True, {}),
            (False, False, {"p": 1}),
        ]

    def test_runs_that_differ_stay_apart(self):
        others = [small("fifo"), small("tiresias"), small("fifo", {"seed": 1}), small("fifo", {"interval_s": 30})]
        assert len(distinct([Case("all", tuple(others))])) == 4

    def test_each_case_gets_its_outcomes_under_its_label(self):
        cases = [Case("slow", (small("fifo", {"interval_s": 600}),)), Case("fair", (small("fifo", fairness=True),))]
        runs = run_cases(distinct(cases), 1, quiet)
        slow, fair = (runs.measured(case) for case in cases)
        assert slow.avg_jct_s > fair.avg_jct_s
        assert slow.outcomes[0].policy == "slow"
        assert (slow.document()["fairness"], fair.document()["fairness"]["below_2"]) == (None, 1.0)

    def test_figures_are_means_over_the_workloads(self):
        case = Case("both", (small("fifo"), Scenario("demo", "fifo")))
        found = run_cases(distinct([case]), 1, quiet).measured(case)
        assert found.avg_jct_s == pytest.approx(sum(run.figures()["avg_jct_s"] for run in found.outcomes) / 2)


class TestSweep:
    def plan(self, *policies: str, **settings: object) -> Plan:
        return Plan([small(policies[0])], policies, settings)

    @pytest.mark.parametrize("name", AXES)
    def test_every_axis_has_its_base_among_its_values(self, name):
        assert AXES[name].base in AXES[name].values

    def test_varies_one_setting(self):
        cases = cases_of(axis_of("interval"), (30, 60), self.plan("fifo", "tiresias"))
        found = [(case.label, case.value, case.scenarios[0].options.interval_s) for case in cases]
        assert found == [("fifo", 30, 30), ("fifo", 60, 60), ("tiresias", 30, 30), ("tiresias", 60, 60)]

    def test_varies_the_number_of_jobs(self):
        cases = cases_of(axis_of("load"), (0.5, 1, 2), self.plan("fifo"))
        assert [len(case.scenarios[0].content.jobs) for case in cases] == [1, 2, 4]

    def test_files_are_scaled_too(self, tmp_path):
        path = tmp_path / "jobs.csv"
        path.write_text("name,time,application,num_replicas,batch_size\na,0,ncf,1,256\nb,60,ncf,1,256\n")
        plan = Plan([Scenario(str(path), "fifo", TWO_NODES)], ["fifo"])
        (case,) = cases_of(axis_of("load"), (2,), plan)
        assert [job.name for job in case.scenarios[0].content.jobs] == ["a", "a~2", "b~2", "b"]

    def test_avoidance_is_a_variant_of_policies_that_have_it(self):
        cases = cases_of(axis_of("interference"), (0.5,), self.plan("fifo", "pollux"))
        assert [case.label for case in cases] == ["fifo", "pollux, avoiding", "pollux, not avoiding"]
        assert [case.scenarios[0].options.policy.get("avoid_interference") for case in cases] == [None, True, False]

    def test_rows_tell_the_change_from_the_base(self):
        axis = axis_of("interval")
        cases = cases_of(axis, (480, 60), self.plan("fifo"))
        runs = run_cases(distinct(cases), 1, quiet)
        late, usual = rows_of(axis, [runs.measured(case) for case in cases])
        assert usual.change == 0.0
        assert late.change == pytest.approx(late.avg_jct_s / usual.avg_jct_s - 1)
        assert late.change > 0

    def test_without_the_base_the_first_value_takes_its_place(self):
        axis = axis_of("interval")
        cases = cases_of(axis, (480, 30), self.plan("fifo"))
        runs = run_cases(distinct(cases), 1, quiet)
        assert rows_of(axis, [runs.measured(case) for case in cases])[0].change == 0.0

    def test_pollux_takes_its_exponent(self):
        axis = axis_of("p")
        cases = cases_of(axis, axis.values, self.plan("pollux"))
        runs = run_cases(distinct(cases), 1, quiet)
        assert len(rows_of(axis, [runs.measured(case) for case in cases])) == len(axis.values)

    def test_refuses_what_it_cannot_vary(self):
        with pytest.raises(UnknownName, match="interference, interval, load, p"):
            axis_of("speed")
        with pytest.raises(InvalidInput, match="fifo has no option p"):
            cases_of(axis_of("p"), (1,), self.plan("pollux", "fifo"))
        with pytest.raises(InvalidInput, match="sets interval_s itself"):
            cases_of(axis_of("interval"), (30,), self.plan("fifo", interval_s=60))
        with pytest.raises(UnknownName, match="nonsense"):
            cases_of(axis_of("interval"), (30,), self.plan("fifo", **{"policy.nonsense": 1}))

    def test_values_are_numbers_each_once(self):
        axis = axis_of("load")
        assert values_of(axis, None) == axis.values
        assert values_of(axis, "1, 2,1.0") == (1.0, 2.0)
        for text in ("", "1,x", "nan", "1,,2"):
            with pytest.raises(InvalidInput, match=r"for example 0\.5,1,1\.5,2"):
                values_of(axis, text)


@pytest.fixture(scope="module")
def reproduced():
    """The whole reproduction with a handful of jobs."""
    world = World(TINY, search={"policy.population": 6, "policy.generations": 2})
    parts = parts_of(world)
    scenarios = distinct([case for part in parts for case in part.cases])
    runs = run_cases(scenarios, 1, quiet)
    return world, [part.measured(runs) for part in parts], scenarios


class TestReproduction:
    def test_has_all_parts_in_the_order_of_the_page(self, reproduced):
        world, parts, _ = reproduced
        assert [part.part.name for part in parts] == list(PARTS)
        sections = paper_sections(world, parts, claims_of({part.part.name: part for part in parts}))
        assert [section.title for section in sections] == ["Summary", *(part.part.title for part in parts)]
        page = render("tiny", sections)
        assert "own data was not found" in page
        assert "artifact: avg JCT" not in page

    def test_parts_share_their_runs(self, reproduced):
        _, parts, scenarios = reproduced
        wanted = sum(len(case.case.scenarios) for part in parts for case in part.cases)
        # A sample: 3 policies, 2 of them realistic; 3 more loads of each; 4 intervals; 8 interferences; 2 exponents.
        assert len(scenarios) == 2 * (3 + 2 + 9 + 4 + 8 + 2)
        assert wanted == 2 * (5 + 12 + 5 + 9 + 3 + 5) + 2
        assert sum(scenario.fairness for scenario in scenarios) == 2 * 5
        assert sum(scenario.histories for scenario in scenarios) == 2

    def test_is_json(self, reproduced):
        _, parts, _ = reproduced
        document = json.loads(json.dumps({part.part.name: part.document() for part in parts}))
        (case, *_) = document["interval"]["cases"]
        assert (case["label"], case["value"], case["published"]) == ("pollux", 30.0, {"avg_jct_s": 2729.0})
        assert case["published_change"] == pytest.approx(2729 / 2751 - 1)
        assert [run["workload"] for run in case["runs"]] == ["tiny-1", "tiny-2"]

    def test_claims_are_those_of_the_parts_at_hand(self, reproduced):
        _, parts, _ = reproduced
        by_name = {part.part.name: part for part in parts}
        assert len(claims_of(by_name)) == 16
        claims = claims_of({"p": by_name["p"]})
        assert [claim.paper for claim in claims] == [pytest.approx(0.83 / 0.76 - 1), pytest.approx(0.84 / 0.76 - 1)]

    def test_interference_is_also_shown_with_the_search_of_the_paper(self, reproduced):
        _, parts, _ = reproduced
        part = next(part for part in parts if part.part.name == "interference")
        found = {case.case.label: case.case.scenarios[0].options.policy for case in part.cases}
        assert list(found) == ["pollux, avoiding", "pollux, not avoiding", "pollux, genetic, not avoiding"]
        assert dict(found[GENETIC_NOT_AVOIDING]) == {
            "avoid_interference": False,
            "solver": "genetic",
            "population": 6,
            "generations": 2,
        }
        claim = next(claim for claim in claims_of({"interference": part}) if claim.text == UNAVOIDED_GENETIC)
        assert claim.paper == pytest.approx(3903 / 2758 - 1)
        assert claim.here == part.change(part.case(GENETIC_NOT_AVOIDING, 0.5))

    def test_a_preset_that_searches_so_needs_no_line_of_its_own(self):
        (part,) = parts_of(World(TINY, "artifact"), ["interference"])
        assert {case.label for case in part.cases} == {"pollux, avoiding", "pollux, not avoiding"}

    def test_some_parts_alone(self):
        assert [part.name for part in parts_of(World(TINY), ["p", "load"])] == ["load", "p"]
        with pytest.raises(UnknownName, match="adaptation, fairness"):
            parts_of(World(TINY), ["figures"])

    def test_a_preset_reaches_every_run(self):
        (scenario, _) = World(TINY, "artifact").scenarios("tiresias")
        assert scenario.options.world.whole_seconds

    def test_generated_samples_are_like_the_built_in_one(self):
        samples = generated_samples(2)
        first, second = (samples.scenario(name).content for name in samples.names)
        assert first.jobs == built_in_workload("paper").jobs
        assert second.jobs != first.jobs
        realistic = samples.scenario(samples.names[0], is_realistic=True).content
        assert realistic.jobs == built_in_workload("paper-realistic").jobs
        assert len(samples.scenario(samples.names[0], load=1.5).content.jobs) == 240

    @pytest.mark.parametrize(("num_jobs", "load"), [(5, 0.5), (3, 1.5), (24, 0.52), (1, 0.1)])
    def test_samples_and_sweeps_round_a_load_alike(self, num_jobs, load):
        samples = replace(TINY, base=replace(TINY.base, num_jobs=num_jobs))
        at_one = samples.scenario("tiny-1").content
        assert len(samples.scenario("tiny-1", load).content.jobs) == len(scaled(at_one, load, 0).jobs)


class TestVerdict:
    def test_names_what_is_far_from_what_was_published(self):
        near, far = Claim("near", 0.48, 0.40, 0.41), Claim("far", 0.42, None, 0.01, is_change=True)
        assert verdict([near, far]) == (
            "1 of 2 figures below lie within 5 points of what was published. Not so: far (+42 % published, +1 % here)."
        )

    def test_says_nothing_where_nothing_was_published(self):
        assert verdict([Claim("alone", None, None, 0.5)]) == ""


class TestPublished:
    def test_means_what_the_file_says(self, tmp_path):
        path = tmp_path / "results.json"
        jcts = {"a": 100, "b": 300}
        path.write_text(json.dumps({"pollux": {"1.0": {"w": {"avg_jct_s": 200, "jcts_s": jcts}}}}))
        results = read_results(path)
        assert results.figures("pollux", 1.0, "w", SMALL.jobs) == {
            "avg_jct_s": 200.0,
            "p50_jct_s": 200.0,
            "p99_jct_s": pytest.approx(298.0),
            "makespan_s": 330.0,
        }
        assert results.figures("pollux", 2.0, "w", SMALL.jobs) is None

    def test_a_damaged_file_is_refused(self, tmp_path):
        path = tmp_path / "results.json"
        path.write_text("[]")
        with pytest.raises(InvalidDocument, match="is no JSON object"):
            read_results(path)

    def test_a_folder_without_the_paper_is_refused(self, tmp_path):
        with pytest.raises(InvalidInput, match="no pollux-osdi21/workloads"):
            paper_samples(tmp_path, None)

    @pytest.mark.data
    def test_of_the_very_samples_that_are_run(self, pollux_data):
        samples = paper_samples(pollux_data, 1)
        assert samples.published("pollux")["avg_jct_s"] == pytest.approx(2088.76875)
        assert samples.published("tiresias", 2.0)["avg_jct_s"] == pytest.approx(10138.175)
        assert len(paper_samples(pollux_data, None).names) == 4
        with pytest.raises(InvalidInput, match="there are 4"):
            paper_samples(pollux_data, 5)
