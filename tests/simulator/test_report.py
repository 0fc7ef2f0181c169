"""The report: a page that needs nothing but itself, its figures, and its data."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.simulator.scenes import EQUAL_SHARE

from pollux.core import Cluster
from pollux.errors import InvalidInput, MissingDependency
from pollux.simulator import report
from pollux.simulator.cluster_file import ClusterFile
from pollux.simulator.fairness import Fairness
from pollux.simulator.metrics import JobOutcome, Outcome
from pollux.simulator.report import standard
from pollux.simulator.report.line_figures import line_figure
from pollux.simulator.report.samples import nice_bin_s, over_rounds, over_time
from pollux.simulator.report.svg import inline, png
from pollux.simulator.report.tables import jobs_tables
from pollux.simulator.scenario import GPU_TYPE, Scenario, simulate
from pollux.simulator.timeline import History, Timeline

WORKLOAD = """name,time,application,num_replicas,batch_size
<b>&"quoted",0,cifar10,2,256
$x_y$,100,cifar10,1,128
_hidden,130,ncf,1,256
plain,400,ncf,2,512
"""
NAMES = ['<b>&"quoted"', "$x_y$", "_hidden", "plain"]
POLICIES = ("fifo", "optimus", EQUAL_SHARE)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[Outcome]:
    """Two policies and an adaptive one, over two workloads; the second without the adaptive one."""
    folder = tmp_path_factory.mktemp("workloads")
    (folder / "odd.csv").write_text(WORKLOAD.replace('<b>&"quoted"', '"<b>&""quoted"""'))
    (folder / "even.csv").write_text("name,time,application,num_replicas,batch_size\nonly,0,ncf,1,256\n")
    cluster = ClusterFile(Cluster.uniform(2, 2, GPU_TYPE))
    first = [
        simulate(Scenario(str(folder / "odd.csv"), policy, cluster, histories=True, fairness=policy != EQUAL_SHARE))
        for policy in POLICIES
    ]
    return [*first, *(simulate(Scenario(str(folder / "even.csv"), policy, cluster)) for policy in POLICIES[:2])]


@pytest.fixture(scope="module")
def folder(outcomes, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    assert written(outcomes, folder) == folder / "report.html"
    return folder


def written(outcomes: list[Outcome], folder: Path) -> Path:
    """A report with a section of a study's own."""
    figure = line_figure("Load", "jobs", "h", {"a": [(1, 2), (2, 3)]}, {"a": [(1, 2.5), (2, 3.5)]}, logx=True)
    table = report.Table(["x", "y"], [["one", 1.5], ["two", None]], "numbers")
    own = report.Section("My study", "Text & more.", [report.Picture("load", figure, "alt <text>")], [table])
    return report.write_report(outcomes, folder, title="a < b & c", sections=[own])


def pictures_tag(content: str) -> str:
    """How a page names its pictures."""
    return f'<html><head><meta name="pollux-pictures" content="{content}"></head></html>'


@pytest.fixture(scope="module")
def page(folder) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Text, ids and loads of a page; refuses what is not closed, or closed wrongly."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.links: list[str] = []
        self.images = 0
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.see(tag, dict(attrs))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.see(tag, dict(attrs))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text.append(data)

    def see(self, tag, attributes):
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag == "a":
            self.links.append(attributes["href"])
        elif tag != "use":
            self.loads += [attributes[key] for key in ("src", "href", "data", "srcset") if attributes.get(key)]
        if attributes.get("role") == "img":
            assert attributes["aria-label"]
            self.images += 1


class TestThePage:
    def test_is_well_formed_and_every_id_is_its_own(self, page):
        reader = Reader(page)
        assert len(set(reader.ids)) == len(reader.ids)
        assert {link.removeprefix("#") for link in reader.links} <= set(reader.ids)

    def test_tells_of_every_job_and_policy(self, page):
        text = "".join(Reader(page).text)
        for name in (*NAMES, "only", *POLICIES, "odd", "even", "a < b & c"):
            assert name in text

    def test_loads_nothing_from_anywhere(self, page):
        assert "http://" not in page
        assert "https://" not in page
        assert "@import" not in page
        assert all(load.startswith("data:image/png;base64,") for load in Reader(page).loads)
        assert "default-src 'none'" in page

    def test_has_text_for_those_who_do_not_see_its_figures(self, page, folder):
        assert Reader(page).images >= len(list(folder.glob("*.png")))

    def test_takes_its_colours_from_variables_that_are_defined(self, page):
        used, defined = set(re.findall(r"var\(--([\w-]+)\)", page)), set(re.findall(r"--([\w-]+):", page))
        assert "ink" in used
        assert used <= defined

    def test_draws_a_timeline_for_every_job_with_a_history(self, page):
        assert page.count('class="strip"') == page.count('class="tracks"') == 3 * len(NAMES)

    def test_names_the_inputs(self, page):
        text = "".join(Reader(page).text)
        for part in ("2 × 2 t4", "world.realloc_delay_s", "interval_s", "seed", "built-in applications"):
            assert part in text

    def test_names_options_that_nobody_set(self, page):
        text = " ".join(Reader(page).text)
        assert re.search(r"policy\.backfill\s+false", text)
        assert re.search(r"world\.node_mtbf_s\s+none", text)

    def test_the_worst_of_several_workloads_is_the_worst_of_all(self, outcomes):
        measured = [replace(run, fairness=Fairness((rho,) * len(run.jobs), (1.0,) * len(run.jobs)))
                    for run, rho in ((outcomes[0], 3.0), (outcomes[3], 1.0))]  # fmt: skip
        table = standard.summary_section(measured).tables[0]
        column = list(table.headings).index("worst ρ")
        assert [(row[0], row[column].key) for row in table.rows] == [("odd", 3.0), ("even", 1.0), ("mean", 3.0)]

    def test_shows_means_where_there_are_several_workloads(self, outcomes, page):
        assert ">mean<" in page
        assert ">mean<" not in report.render("x", [report.Section("s", tables=jobs_tables(outcomes))])


class TestFiles:
    def test_figures_lie_beside_the_page(self, folder):
        names = {path.stem for path in folder.glob("*.png")}
        assert {"jct", "rho", "gpus-by-job", "cluster-efficiency", "coadaptation-1", "coadaptation-2"} <= names
        for path in folder.glob("*.png"):
            content = path.read_bytes()
            assert content.startswith(b"\x89PNG")
            assert len(content) > 5000
        assert not list(folder.glob(".*")), "nothing half-written is left"

    def test_the_data_are_those_of_the_outcomes(self, folder, outcomes):
        document = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        assert document["runs"] == json.loads(json.dumps([outcome.document() for outcome in outcomes]))
        assert document["means"].keys() == set(POLICIES)
        history = document["runs"][0]["histories"]["plain"]
        assert len({len(column) for column in history.values()}) == 1

    def test_equal_outcomes_give_equal_bytes(self, folder, outcomes, tmp_path):
        written(outcomes, tmp_path / "again")
        assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "again").iterdir()}
        for path in folder.iterdir():
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name

    def test_pictures_of_the_page_before_are_gone_and_nothing_else_is(self, tmp_path):
        def write(*names: str) -> None:
            pictures = [report.Picture(name, line_figure(name, "x", "y", {"a": [(0, 1)]}), name) for name in names]
            report.write_page(tmp_path, "x", [report.Section("s", figures=pictures)])

        (tmp_path / "holiday.png").write_text("mine")
        write("first", "both")
        write("both", "second")
        assert {path.name for path in tmp_path.glob("*.png")} == {"holiday.png", "both.png", "second.png"}

    @pytest.mark.parametrize(
        "before",
        [b"<html><img src='holiday.png'></html>", b"\xff\xfe", pictures_tag("../holiday holiday.png").encode()],
    )
    def test_a_page_of_others_takes_nothing_with_it(self, tmp_path, before):
        (tmp_path / "holiday.png").write_text("mine")
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "report.html").write_bytes(before)
        report.write_page(tmp_path / "new", "x", [report.Section("s")])
        assert (tmp_path / "holiday.png").read_text() == "mine"

    def test_a_folder_that_is_a_file_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(InvalidInput, match="cannot be written"):
            report.write_page(tmp_path / "file", "x", [])

    def test_no_outcomes_are_no_report(self, tmp_path):
        with pytest.raises(InvalidInput, match="nothing to report"):
            report.write_report([], tmp_path, title="x")


class TestWhatIsThere:
    def test_without_fairness_and_histories_there_is_nothing_drawn_of_them(self, outcomes):
        bare = [replace(outcome, fairness=None, histories=None) for outcome in outcomes]
        assert [picture.name for picture in standard.times_section(bare).figures] == ["jct"]
        assert standard.gpus_section(bare) is None
        assert standard.coadaptation_section(bare) is None
        tables = [*standard.summary_section(bare).tables, *standard.jobs_section(bare).tables]
        headings = {heading for table in tables for heading in table.headings}
        assert not headings & {"ρ", "worst ρ", "unfair jobs", "GPUs over time"}

    def test_a_page_that_would_be_too_heavy_leaves_jobs_to_the_data(self, outcomes, monkeypatch):
        monkeypatch.setattr("pollux.simulator.report.tables.MAX_ROWS", 9)
        assert [len(table.rows) for table in jobs_tables(outcomes)] == [4, 4]

    def test_without_matplotlib_the_error_says_what_to_install(self, outcomes, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(MissingDependency, match=r"pollux\[plot\]"):
            report.write_report(outcomes, tmp_path / "new", title="x")
        assert not (tmp_path / "new").exists()


class TestSectionsOfOthers:
    def test_stand_below_the_summary(self, page, folder):
        assert page.index("<h2>Summary") < page.index("<h2>My study") < page.index("<h2>Job completion")
        assert "Text &amp; more." in page
        assert 'aria-label="alt &lt;text&gt;"' in page
        assert (folder / "load.png").exists()
        assert "a, published" in page

    def test_can_be_a_page_by_themselves(self, tmp_path):
        path = report.write_page(tmp_path, "study", [report.Section("One", ["first", "second"])])
        assert Reader(path.read_text(encoding="utf-8")).images == 0
        assert [path.name for path in tmp_path.iterdir()] == ["report.html"]

    def test_may_share_a_title(self):
        reader = Reader(report.render("x", [report.Section("One"), report.Section("One")]))
        assert len(set(reader.ids)) == len(reader.links) == 2

    def test_letters_that_a_font_lacks_are_left_to_the_browser(self):
        figure = line_figure("工作", "x", "y", {"任务": [(0, 1)], "b": [(0, 2)]})
        assert png(figure)
        assert "工作" in inline(figure, "f", "alt")

    def test_a_logarithmic_axis_has_numbers_however_short_it_is(self):
        axes = line_figure("t", "x", "y", {"a": [(63.0, 1), (64.0, 2)]}, logx=True).axes[0]
        low, high = axes.get_xlim()
        assert [tick for tick in axes.get_xticks() if low <= tick <= high]

    def test_a_flat_line_stays_inside_its_axes(self):
        axes = line_figure("t", "x", "y", {"a": [(1, 3.0), (2, 3.01)]}).axes[0]
        low, high = axes.get_ylim()
        assert low == 0.0
        assert high - 3.01 >= 0.03 * (high - low)

    def test_few_places_of_a_logarithmic_axis_are_named_themselves(self):
        line = [(x, 1.0) for x in (1.0, 2.0, 4.0, 8.0)]
        axes = line_figure("t", "x", "y", {"a": line}, {"a": [(0.5, 1.0)]}, logx=True).axes[0]
        assert axes.get_xticks().tolist() == [0.5, 1.0, 2.0, 4.0, 8.0]
        many = line_figure("t", "x", "y", {"a": [(float(x), 1.0) for x in range(1, 10)]}, logx=True).axes[0]
        assert {1.0, 2.0, 5.0} <= set(many.get_xticks()), "too many to name each"
        assert 4.0 not in many.get_xticks()

    def test_names_that_mean_something_to_matplotlib_are_shown_as_they_are(self):
        text = inline(line_figure("$1 and $2", "x", "y", {"_under": [(0, 1)], "b": [(0, 2)]}), "f", "alt")
        assert "$1 and $2" in text
        assert "_under" in text


class TestSamples:
    def test_of_histories_are_means_over_time(self, outcomes):
        """Whatever the bins, what they hold adds up to what jobs held, waited and did."""
        for outcome in outcomes[: len(POLICIES)]:
            for bin_s in (60.0, 47.0, 1e6):
                found = over_time(outcome, bin_s)
                length_s = np.diff(found.start_s)
                held, active = (column[:-1] @ length_s for column in (found.gpus_held, found.active_jobs))
                assert held == pytest.approx(sum(job.gpu_s for job in outcome.jobs))
                assert active == pytest.approx(sum(job.jct_s for job in outcome.jobs))
                assert found.start_s[-1] == max(job.finished_at_s for job in outcome.jobs)

    def test_of_a_history_checked_by_hand(self):
        """Two GPUs for 60 s that wait, then train for 30 s; four more for 20 s; nothing from then on."""
        history = History()
        history.note(60.0, 2, 1, 32, 0.5, 0.0)
        history.note(120.0, 2, 1, 32, 0.5, 10.0)
        history.note(150.0, 6, 2, 96, 0.25, 30.0)
        history.note(170.0, 0, 0, 0, 0.0, 0.0)
        job = JobOutcome("a", "ncf", 10.0, 60.0, 170.0, 1, 300.0)
        found = over_time(Outcome("w", "p", {}, (job,), Timeline(), [0.0], 0.0, histories={"a": history}), 100.0)
        assert found.start_s.tolist() == [0.0, 100.0, 170.0]
        assert found.gpus_held[:2].tolist() == pytest.approx([80 / 100, (2 * 50 + 6 * 20) / 70])
        assert found.efficiency[:2].tolist() == pytest.approx([0.5, (100 * 0.5 + 120 * 0.25) / 220])
        assert found.goodput[:2].tolist() == pytest.approx([0.0, (30 * 10 + 20 * 30) / 70])
        assert found.throughput[:2].tolist() == pytest.approx([0.0, (30 * 20 + 20 * 120) / 70])
        assert found.active_jobs[:2].tolist() == pytest.approx([0.9, 1.0])
        assert found.running_jobs[:2].tolist() == pytest.approx([0.4, 1.0])

    def test_the_page_says_what_its_means_are_of(self, outcomes):
        bare = [replace(outcome, histories=None) for outcome in outcomes]
        with_histories, without = (" ".join(standard.cluster_section(runs).text) for runs in (outcomes, bare))
        assert "of what was true right after each round" in without
        assert "of what was true right after each round" not in with_histories
        assert "up to the next" in with_histories

    def test_of_rounds_are_means_weighted_by_gpus(self):
        timeline = Timeline()
        rows = [(60.0, 2, 1.0, 4.0), (90.0, 6, 0.5, 8.0), (200.0, 0, None, 0.0)]
        for time_s, training, efficiency, throughput in rows:
            for name, value in {
                "time_s": time_s,
                "gpus_training": training,
                "efficiency": efficiency,
                "throughput": throughput,
            }.items():
                getattr(timeline, name).append(value)
            for name in ("num_gpus", "active_jobs", "running_jobs", "gpus_held", "goodput"):
                getattr(timeline, name).append(1)
        found = over_rounds(timeline, 100.0)
        assert found.start_s.tolist() == [0.0, 100.0, 200.0, 300.0]
        assert found.efficiency.tolist()[0] == pytest.approx((2 * 1.0 + 6 * 0.5) / 8)
        assert found.throughput.tolist()[0] == pytest.approx(6.0)
        assert str(found.efficiency[1:].tolist()) == "[nan, nan, nan]"

    def test_short_runs_have_short_bins(self, outcomes):
        assert nice_bin_s(outcomes) in (60.0, 300.0)


CHECK = """
<script>
const found = {};
const table = Array.from(document.querySelectorAll("table")).find(it => it.rows[0].cells[0].textContent === "job");
const column = Array.from(table.rows[0].cells).findIndex(it => it.textContent.startsWith("JCT"));
const read = () => Array.from(table.tBodies[0].rows, row => Number(row.cells[column].dataset.key));
const button = table.rows[0].cells[column].firstChild;
button.click(); found.up = read();
button.click(); found.down = read();
found.sort = button.parentNode.getAttribute("aria-sort");
const strip = table.querySelector("details");
strip.querySelector("summary").click();
found.opened = strip.open;
found.errors = window.errors;
document.documentElement.dataset.found = JSON.stringify(found);
</script>
"""


NARROW = """
<iframe src="page.html" style="width: 420px; height: 900px; border: 0"></iframe>
<script>
addEventListener("load", () => {
  const view = document.querySelector("iframe").contentWindow;
  const right = it => it.getBoundingClientRect().right;
  const plots = Array.from(view.document.querySelectorAll("figure > svg"));
  const found = {width: view.innerWidth, plots: plots.length, right: Math.max(...plots.map(right))};
  const wide = view.document.querySelector("section > figure");
  wide.focus();
  found.chosen = wide.querySelector("svg").getBoundingClientRect().width;
  document.documentElement.dataset.found = JSON.stringify(found);
});
</script>
"""


def opened(browser: str, path: Path) -> dict[str, Any]:
    """What a page found out about itself when a browser opened it."""
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    arguments += [f"--user-data-dir={path.parent / 'profile'}", "--dump-dom"]
    done = subprocess.run([browser, *arguments, path.as_uri()], capture_output=True, text=True, timeout=100)
    (dumped,) = re.findall(r'data-found="([^"]*)"', done.stdout)
    return json.loads(dumped.replace("&quot;", '"'))


def test_a_browser_shows_the_page_and_sorts_its_tables(browser, page, outcomes, tmp_path):
    watch = '<script>window.errors = []; addEventListener("error", it => window.errors.push(it.message));</script>'
    checked = tmp_path / "checked.html"
    checked.write_text(page.replace("<style>", f"{watch}<style>", 1).replace("</body>", f"{CHECK}</body>"))
    found = opened(browser, checked)
    jcts = sorted(job.jct_s for job in outcomes[0].jobs)
    assert found["errors"] == []
    assert found["up"] == pytest.approx(jcts)
    assert found["down"] == pytest.approx(jcts[::-1])
    assert (found["sort"], found["opened"]) == ("descending", True)


def test_on_a_telephone_no_plot_is_cut_off_and_one_that_is_chosen_is_large(browser, page, tmp_path):
    (tmp_path / "page.html").write_text(page)
    (tmp_path / "narrow.html").write_text(NARROW)
    found = opened(browser, tmp_path / "narrow.html")
    assert (found["width"], found["plots"] > 5) == (420, True)
    assert found["right"] <= 420
    assert found["chosen"] > 600
