"""Communication over time, drawn from timelines made up so that the answer is known."""

import json

import pytest
from click.testing import CliRunner

from candle_p1.cli.timeline import timeline_command
from candle_p1.records.per_rank import PER_RANK_NAME
from candle_p1.records.record import read_record, write_record
from candle_p1.reports.charts import draw_figures
from candle_p1.reports.experiments import group
from candle_p1.reports.frame import MissingDataError, Run, read_runs
from candle_p1.reports.over_time import read_traced, timeline_figure
from candle_p1.reports.render import render_page
from candle_p1.reports.report import run_page
from tests.planted_records import changed, plant

EPOCH_US = 1_768_000_000_000_000
ZERO_S = 5.0
"""When the timelines' clocks are 0, in seconds from the start of the run."""


def events(spans):
    """Returns a timeline: activities within each other, by their seconds from the run's start."""
    args = {"start_time_since_epoch_in_micros": EPOCH_US + int(ZERO_S * 1e6)}
    marks = []
    for i, (name, begin_s, end_s) in enumerate(spans):
        marks.append((begin_s, 0, {"ph": "B", "name": name, "pid": i + 1}))
        marks.append((end_s, 1, {"ph": "E", "pid": i + 1}))
    marks.sort(key=lambda mark: mark[:2])
    found = [each | {"ts": round((s - ZERO_S) * 1e6)} for s, _, each in marks]
    return [{"name": "process_name", "ph": "M", "pid": 0, "args": args}, *found]


def traced(directory, loader, ready_s, waited_s, *, meets=True, num_ranks=2):
    """Plants a traced run: ranks wait, broadcast for a second, then reduce for 10 s.

    The first rank is ready to broadcast at `ready_s`, and waits: before Horovod's negotiation, as
    ranks of this package do, or, where it does not meet them, within it.
    """
    facts = {"loader": loader, "load_s": ready_s - 3, "training": {"traced": True}}
    path = plant(directory, "nt3", num_ranks, wait_s=waited_s if meets else 0.0, **facts)
    begin_s = ready_s + waited_s if meets else ready_s
    ends_s = ready_s + waited_s + 0.25 * meets
    spans = [("NEGOTIATE_BROADCAST", begin_s, ends_s)]
    spans += [(name, ends_s, ends_s + 1) for name in ("BROADCAST", "MPI_BCAST")]
    for at_s in range(10):
        parts = ("NEGOTIATE_ALLREDUCE", 0, 0.25), ("ALLREDUCE", 0.25, 0.75)
        for name, begin, end in (*parts, ("NCCL_ALLREDUCE", 0.25, 0.5)):
            spans.append((name, ends_s + 2 + at_s + begin, ends_s + 2 + at_s + end))
    path.with_name("timeline.json").write_text(json.dumps(events(spans)))
    facts = {"file": "/elsewhere/timeline.json", "anchor_epoch_us": EPOCH_US, "anchor_s": 0.0}
    write_record(path, changed(read_record(path), {"timeline": facts}))
    return Run(path, read_record(path))


@pytest.mark.parametrize("meets", [True, False])
def test_the_broadcast_overhead_is_that_of_the_paper(tmp_path, meets):
    """Whether ranks wait before Horovod's negotiation or within it, it is 43.72 s in all."""
    waited_s = 43.72 - 1 - 0.25 * meets
    run = traced(tmp_path, "original", 20.0, waited_s, meets=meets)
    each = read_traced("original", run)
    assert each.zero_s == ZERO_S
    (axes,) = timeline_figure([each]).axes
    (text,) = [text.get_text() for text in axes.texts if "waiting" in text.get_text()]
    assert text == "43.7 s: 42.7 s waiting, 1.000 s broadcasting"
    bars = [bar for bars in axes.containers for bar in bars if round(bar.get_y() + 0.4) == 1]
    drawn = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars)
    assert drawn[0][0] == pytest.approx(20.0)
    assert max(end for _, end in drawn) == pytest.approx(63.72)


def test_runs_are_drawn_one_above_the_other_on_one_time_axis(tmp_path):
    runs = [traced(tmp_path, "original", 30.0, 20.0), traced(tmp_path, "chunked", 10.0, 2.0)]
    first, second = timeline_figure([read_traced(run["loader"], run) for run in runs]).axes
    assert first.get_xlim() == second.get_xlim() == (0, runs[0]["total_s"])
    assert [label.get_text() for label in first.get_yticklabels()] == [
        "phases of rank 0", "broadcast overhead",
        "broadcast: negotiation", "broadcast", "broadcast: transfer by MPI",
        "allreduce: negotiation", "allreduce", "allreduce: transfer by NCCL",
    ]  # fmt: skip


def drawn(directory):
    (experiment,) = group(read_runs([directory]).runs)
    figures, _ = draw_figures(experiment)
    return [each for each in figures if each.slug.endswith("timeline")]


def test_series_are_drawn_on_the_largest_number_of_ranks_that_all_have(tmp_path):
    for loader in ("original", "parallel"):
        traced(tmp_path, loader, 5, 1)
    larger = traced(tmp_path, "original", 5, 1, num_ranks=4)
    (drawing,) = drawn(tmp_path)
    assert "loader original, 2 ranks" in drawing.svg
    assert "4 ranks" not in drawing.svg
    # A published value is shown only beside a run of its loader.
    assert "43.72 s" in drawing.caption
    assert "4.65 s" not in drawing.caption
    assert "broadcast: negotiation" in render_page(run_page(larger))


def naming(run, file):
    """Returns a run whose record, which may come from elsewhere, names any file."""
    return Run(run.path, changed(run.record, {"timeline.file": str(file)}))


@pytest.mark.parametrize("content", ["root:x:0:0", "[]"])
def test_a_file_that_is_no_timeline_is_named_and_not_shown(tmp_path, content):
    run = naming(traced(tmp_path, "original", 5, 1), tmp_path / "secret")
    (tmp_path / "secret").write_text(content)
    with pytest.raises(MissingDataError, match="run000") as refused:
        read_traced("original", run)
    assert "x:0:0" not in str(refused.value)


@pytest.mark.parametrize("name", ["absent", "", "..", "x" * 5000, "a\0b", "run000"])
def test_a_file_that_cannot_be_is_not_found(tmp_path, name):
    run = naming(traced(tmp_path, "original", 5, 1), name)
    with pytest.raises(MissingDataError, match=r"run000.* not beside its record"):
        read_traced("original", run)


def test_damaged_values_of_ranks_are_named_and_the_other_run_is_drawn(tmp_path):
    for loader in ("original", "chunked"):
        traced(tmp_path, loader, 5, 1)
    (tmp_path / "run000" / PER_RANK_NAME).write_bytes(b"damaged")
    (drawing,) = drawn(tmp_path)
    assert PER_RANK_NAME in drawing.caption
    assert "loader chunked" in drawing.svg


def test_the_summary_adds_the_waiting_that_the_record_has(tmp_path):
    run = traced(tmp_path, "original", 20.0, 40.0)
    arguments = ["summary", str(run.timeline_file), "--json", str(tmp_path / "summary.json")]
    for record, overhead_s in (([], 1.25), (["--record", str(run.path)], 41.25)):
        done = CliRunner().invoke(timeline_command, arguments + record, catch_exceptions=False)
        broadcast = json.loads((tmp_path / "summary.json").read_text())["broadcast"]
        assert broadcast["overhead_s"] == pytest.approx(overhead_s)
        assert f"broadcast overhead {overhead_s:.3f} s" in done.output
