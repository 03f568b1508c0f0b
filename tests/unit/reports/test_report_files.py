"""The files of a report, and the command that writes them."""

from __future__ import annotations

import csv
import io
import sys
import xml.etree.ElementTree as ET
from importlib.util import find_spec

import numpy as np
import pytest
from candle_p1.reports.figures.bars import ranks_over_time, time_parts
from click.testing import CliRunner

from candle_p1 import cli
from candle_p1.errors import ParameterError, RecordError
from candle_p1.figures import curves
from candle_p1.records.power_file import write_traces
from candle_p1.records.power_trace import Channel, Trace
from candle_p1.reports.drawing import count_axis, new_figure
from candle_p1.reports.experiments import group
from candle_p1.reports.figures.lines import epochs_per_rank, quality, scaling
from candle_p1.reports.figures.registry import KINDS, OVER_TIME, draw_figures
from candle_p1.reports.frame import Run, Runs, read_runs
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.render import ReportTable
from candle_p1.reports.report import make_report
from candle_p1.reports.statistics import estimate_median
from tests.planted_records import changed, plant, plant_study, planted_record


def invoke(*words):
    return CliRunner().invoke(cli.cli, ["report", *(str(word) for word in words)])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    plant_study(directory, 2, (1, 2))
    plant(directory, "nt3", 2, status="failed", loader="original")
    (directory / "bad").mkdir()
    (directory / "bad/run.json").write_text("[")
    out = tmp_path_factory.mktemp("out")
    return invoke(directory, "-o", out), out


def test_the_command_writes_page_figures_and_tables(written):
    result, out = written
    assert result.exit_code == 0, result.output
    assert "bad/run.json: line 1: not JSON" in result.output
    assert result.output.endswith("index.html: 9 runs, 12 figures\n")
    figures = sorted(path.name for path in (out / "figures").iterdir())
    names = (
        "communication", "energy", "epochs", "improvement", "loaders", "model", "model-shares",
        "parts", "performance", "quality", "ranks", "scaling",
    )  # fmt: skip
    assert figures == sorted(
        f"nt3-strong-{name}.{ending}" for name in names for ending in ("png", "svg")
    )
    tables = {path.stem for path in (out / "tables").iterdir()}
    assert {
        "nt3-strong-other-improvement",
        "nt3-strong-times",
        "nt3-strong-loading",
        "runs",
        "unreadable",
    } <= tables


def test_figures_are_complete_and_contain_text(written):
    _, out = written
    for path in (out / "figures").glob("*.svg"):
        root = ET.fromstring(path.read_text())
        assert root.tag.endswith("svg")
        assert len(root.findall(".//{http://www.w3.org/2000/svg}text")) > 3
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_tables_hold_the_planted_numbers(written):
    _, out = written
    rows = list(csv.DictReader(io.StringIO((out / "tables/nt3-strong-times.csv").read_text())))
    first = rows[0]
    assert (first["series"], first["ranks"], first["runs"]) == ("loader original", "1", "2")
    assert float(first["data loading (s)"]) == pytest.approx(9.005)
    assert float(first["data loading (s), low"]) == pytest.approx(9.0)
    assert first["data loading (s), confidence"] == "0.5"
    assert rows[1]["not finished"] == "1"
    training = (out / "tables/nt3-strong-training.csv").read_text()
    row = next(csv.DictReader(io.StringIO(training)))
    assert float(row["training rate (samples/s)"]) == pytest.approx(200)
    assert float(row["first step (s)"]) == 0.5
    loading = (out / "tables/nt3-strong-loading.md").read_text()
    assert "published: Summit, Table 3" in loading
    assert (out / "runs.parquet").exists() == bool(find_spec("pyarrow"))
    runs = (out / "tables/runs.csv").read_text()
    assert runs.count("failed") == 1
    assert "rank 0 died" in runs


def test_the_page_lists_what_is_missing(written):
    _, out = written
    text = (out / "index.html").read_text()
    for words in (
        "9 runs: 1 failed and 8 ok.",
        "1 record cannot be read",
        "Not drawn: power over time (",
        "questions</summary>",
        "no runs differ in --batch_scaling",
    ):
        assert words in text, words
    # Nothing that the paper's method gains stands beside another loader.
    assert "67.68 %" not in text
    assert "Figures 11 and 13, Table 5" not in text


def test_figures_that_lack_data_are_listed_with_the_reason(tmp_path):
    plant(tmp_path, "p1b2", 1, epochs=4)
    (section,) = make_report(read_runs([tmp_path])).sections
    drawn = {f"p1b2-strong-{kind.slug}": kind.title for kind in KINDS}
    slugs = [figure.slug for figure in section.figures]
    assert slugs == ["p1b2-strong-performance", "p1b2-strong-parts"]
    lacking = {title for slug, title in drawn.items() if slug not in slugs} | {
        kind.title for kind in OVER_TIME
    }
    assert {title for title, _ in section.missing} == lacking
    assert all(reason for _, reason in section.missing)


def test_power_is_drawn_from_the_readings_beside_a_record(tmp_path):
    path = plant(tmp_path, "nt3", 1, energy_j=100.0, epochs=8)
    (run,) = read_runs([tmp_path]).runs
    record = changed(run.record, {"energy.traces": ["power-0000.csv"]})
    channel = Channel("gpu0", "GPU 0", "gpu", "nvml", "power", 0.1)
    trace = Trace(channel, np.arange(5.0), 100 + np.arange(5.0), 1.0)
    write_traces(path.parent / "power-0000.csv", [trace], 0, 0.0)
    (section,) = make_report(Runs((Run(path, record),), {})).sections
    drawn = {figure.title: figure for figure in section.figures}
    assert "GPU 0" in drawn["Power over time"].svg
    (path.parent / "power-0000.csv").unlink()
    (section,) = make_report(Runs((Run(path, record),), {})).sections
    assert "power-0000.csv" in dict(section.missing)["Power over time"]


@pytest.mark.extended
def test_many_series_are_drawn_in_several_figures(tmp_path):
    for epochs in (1, 2, 4, 8):
        for loader in ("original", "parallel"):
            plant(tmp_path, "nt3", 2, epochs=epochs, epochs_scaling="weak", loader=loader)
    (section,) = make_report(read_runs([tmp_path])).sections
    titles = [figure.title for figure in section.figures]
    assert "Where the time goes (1 of 2)" in titles
    assert "Where the time goes (2 of 2)" in titles


def test_failed_runs_alone_make_a_report(tmp_path):
    plant(tmp_path, "p1b1", 2, status="failed")
    result = invoke(tmp_path, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out/index.html").read_text()
    assert "rank 0 died" in text


def test_errors_name_the_directory(tmp_path, monkeypatch, capsys):
    result = invoke(tmp_path, "-o", tmp_path / "out")
    assert isinstance(result.exception, RecordError)
    plant(tmp_path, "nt3", 1)
    (tmp_path / "file").write_text("")
    result = invoke(tmp_path, "-o", tmp_path / "file/out")
    assert isinstance(result.exception, ParameterError)
    assert str(tmp_path / "file") in str(result.exception)
    monkeypatch.setattr(sys, "argv", ["candle-p1", "report", str(tmp_path / "no"), "-o", "x"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert str(tmp_path / "no") in capsys.readouterr().err


def test_a_table_is_html_markdown_and_csv():
    rows = (("a|b", 1200, 0.5, estimate_median([1.0, 3.0]), None), ("c", 2, None, None, None))
    table = ReportTable(
        "t", "Title", ("name", "num", "s", "median (s)", "empty"), rows, notes=("note",)
    )
    table = table.without_empty_columns()
    assert table.headings == ("name", "num", "s", "median (s)")
    assert [table.is_words(i) for i in range(4)] == [True, False, False, False]
    assert table.texts == [["a|b", "1,200", "0.500", "2.00 [1.00 to 3.00]"], ["c", "2", "-", "-"]]
    assert "| a\\|b | 1,200 | 0.500 | 2.00 [1.00 to 3.00] |" in table.to_markdown()
    lines = list(csv.reader(io.StringIO(table.to_csv())))
    assert lines[0][3:] == [
        "median (s)", "median (s), low", "median (s), high", "median (s), confidence",
        "median (s), runs",
    ]  # fmt: skip
    assert lines[1][1:] == ["1200", "0.5", "2.0", "1.0", "3.0", "0.5", "2"]
    assert lines[2][3:] == ["", "", "", "", ""]


def test_the_figure_of_gains_names_the_lines_of_the_method_of_the_paper(monkeypatch):
    kinds = [kind for kind in KINDS if kind.slug == "improvement"]
    monkeypatch.setattr("candle_p1.reports.figures.registry.KINDS", kinds)
    records = [planted_record(num_ranks=2, loader=name) for name in ("original", "chunked", "dask")]
    (experiment,) = group([Run(i, each) for i, each in enumerate(records)])
    ((drawing,), _) = draw_figures(experiment, "t")
    assert "chunked over original corresponds to the paper's Figures 11 and 13" in drawing.caption
    for base in ("original", "chunked"):
        assert f"against loader {base}" in drawing.svg


def test_a_benchmark_of_another_author_has_a_report(tmp_path):
    record = planted_record("tc1", 1, epochs=4, quality={"r2": 0.5})
    (section,) = make_report(Runs((Run(tmp_path / "run.json", record),), {})).sections
    assert section.title.startswith("TC1, strong scaling")
    assert any("test r2" in table.headings for table in section.tables)


def test_the_axis_of_many_ranks_shows_the_first_and_the_last():
    _, (axes,) = new_figure(1)
    count_axis(axes, [1, 6, 12, 24, 48, 96, 192, 384, 768, 1536, 3072], "ranks")
    low, high = axes.get_xlim()
    assert low < 1
    assert high > 3072
    ticks = axes.get_xticks()
    assert (ticks[0], ticks[-1]) == (1, 3072)
    assert min(np.diff(np.log2(ticks))) > 1


@pytest.mark.extended
def test_diverged_models_do_not_prevent_a_report(tmp_path):
    runs = []
    for num_ranks in (1, 2, 4, 8, 16, 32, 64):
        for seed in (0, 1):
            record = planted_record(
                "p1b1", num_ranks, epochs=64, rng_seed=seed, quality={"loss": None}
            )
            runs.append(Run(tmp_path / f"{len(runs)}.json", record))
    (section,) = make_report(Runs(tuple(runs), {})).sections
    assert any("14 runs diverged" in note for note in section.notes)
    assert "Quality against ranks" in dict(section.missing)


@pytest.mark.parametrize("counts", [(2,), (1, 2), (1, 2, 4, 8)])
def test_bars_have_one_width_and_stand_over_their_labels(counts):
    records = [planted_record("nt3", num, epochs=8) for num in counts]
    (experiment,) = group([Run(i, record) for i, record in enumerate(records)])
    (axes,) = time_parts(experiment, experiment.series).axes
    low, high = axes.get_xlim()
    bars = [bar for bar in axes.patches if bar.get_height()]
    assert {bar.get_x() + bar.get_width() / 2 for bar in bars} == set(axes.get_xticks())
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(num) for num in counts]
    assert max(bar.get_width() for bar in bars) < (high - low) / 3
    assert (low + high) / 2 == pytest.approx(np.mean(axes.get_xticks()))


def test_scaling_names_its_ideal_and_shares_end_at_one():
    records = [planted_record("nt3", num, epochs=8, quality={"accuracy": 1.0}) for num in (1, 2)]
    (experiment,) = group([Run(i, record) for i, record in enumerate(records)])
    (legend,) = scaling(experiment, experiment.series).legends
    assert [text.get_text() for text in legend.get_texts()] == ["all runs", "ideal"]
    drawn = [quality(experiment, experiment.series), curves({"accuracy": [0.5, 1.0]}, title="")]
    assert all(axes.get_ylim()[1] <= 1.02 for figure in drawn for axes in figure.axes)


def test_many_numbers_of_ranks_are_counted_together_against_epochs():
    records = [
        planted_record("nt3", num, epochs=epochs, epochs_scaling="weak", quality={"accuracy": 0.9})
        for num in (1, 2, 4, 8, 16, 32, 64, 128)
        for epochs in (4, 8)
    ]
    (experiment,) = group([Run(i, record) for i, record in enumerate(records)])
    figure = epochs_per_rank(experiment, experiment.series)
    (axes,) = figure.axes
    assert axes.get_legend_handles_labels()[1] == ["all runs"]
    few = group([Run(i, record) for i, record in enumerate(records[:4])])[0]
    labels = epochs_per_rank(few, few.series).axes[0].get_legend_handles_labels()[1]
    assert labels == ["1 rank", "2 ranks"]


def test_what_ranks_do_is_drawn_for_some_of_many_ranks(tmp_path):
    load_s = [2.0] * 40 + [2.5] + [2.0] * 59
    plant(tmp_path, "nt3", 100, epochs=100, load_s=load_s, wait_s=4.0)
    (experiment,) = group(read_runs([tmp_path]).runs)
    (axes,) = ranks_over_time(experiment, experiment.series).axes
    shown = [int(label.get_text()) for label in axes.get_yticklabels()]
    assert (shown[0], shown[-1], len(shown)) == (0, 99, 13)
    assert 40 in shown  # the slowest loader
    drawn = {(bar.get_x(), bar.get_width()) for bar in axes.patches}
    assert {(3.0, 2.0), (3.0, 2.5), (5.5, 4.0)} <= drawn  # loading, then waiting
    (tmp_path / "run000/per_rank.npz").unlink()
    (experiment,) = group(read_runs([tmp_path]).runs)
    with pytest.raises(MissingDataError, match=r"per_rank\.npz"):
        ranks_over_time(experiment, experiment.series)
