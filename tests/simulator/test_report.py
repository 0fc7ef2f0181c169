"""The report: a page that needs nothing but itself, its figures, and its data."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.simulator.scenes import EQUAL_SHARE

from pollux.core import Cluster
from pollux.errors import InvalidInput, MissingDependency
from pollux.simulator import report
from pollux.simulator.cluster_file import ClusterFile
from pollux.simulator.metrics import Outcome
from pollux.simulator.report import standard
from pollux.simulator.report.line_figures import line_figure
from pollux.simulator.report.samples import binned, nice_bin_s
from pollux.simulator.report.svg import inline, png
from pollux.simulator.report.tables import jobs_tables
from pollux.simulator.scenario import GPU_TYPE, Scenario, simulate
from pollux.simulator.timeline import Timeline

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

    def test_names_that_mean_something_to_matplotlib_are_shown_as_they_are(self):
        text = inline(line_figure("$1 and $2", "x", "y", {"_under": [(0, 1)], "b": [(0, 2)]}), "f", "alt")
        assert "$1 and $2" in text
        assert "_under" in text


class TestSamples:
    def test_bins_are_means_weighted_by_gpus(self):
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
        found = binned(timeline, 100.0)
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


def test_a_browser_shows_the_page_and_sorts_its_tables(page, outcomes, tmp_path):
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    watch = '<script>window.errors = []; addEventListener("error", it => window.errors.push(it.message));</script>'
    checked = tmp_path / "checked.html"
    checked.write_text(page.replace("<style>", f"{watch}<style>", 1).replace("</body>", f"{CHECK}</body>"))
    arguments = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom")
    done = subprocess.run([browser, *arguments, checked.as_uri()], capture_output=True, text=True, timeout=100)
    (dumped,) = re.findall(r'data-found="([^"]*)"', done.stdout)
    found = json.loads(dumped.replace("&quot;", '"'))
    jcts = sorted(job.jct_s for job in outcomes[0].jobs)
    assert found["errors"] == []
    assert found["up"] == pytest.approx(jcts)
    assert found["down"] == pytest.approx(jcts[::-1])
    assert (found["sort"], found["opened"]) == ("descending", True)
