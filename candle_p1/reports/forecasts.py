"""Forecasts for ``candle-p1 forecast``: from records of runs, or from what the paper prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from candle_p1.errors import ModelError
from candle_p1.modelling.forecast import Changes, ForecastSource, best_scale, forecast
from candle_p1.modelling.laws import JobShape
from candle_p1.modelling.paper import LoaderTimes, PaperInputs, paper_source
from candle_p1.reports.experiments import MODES, group
from candle_p1.reports.frame import STRONG, WEAK, Run
from candle_p1.reports.model_page import INTERVAL, Row, forecast_row, to_table
from candle_p1.reports.modelled import fitted_words, model_experiment
from candle_p1.reports.published import (
    METHOD_LOADER,
    ORIGINAL_LOADER,
    Published,
    all_published,
    published_loading,
    published_table_1,
)
from candle_p1.reports.render import ReportTable
from candle_p1.reports.words import listed, percent
from candle_p1.text import count

MACHINE = "Summit"
PAPER_MODES = (STRONG, WEAK)
"""The modes of which the paper prints enough for a model."""

SPAN = "Low and high are the ends of the span of all readings, which has no probability."
UNEQUAL = "the ranks cannot have equal shares of the epochs; rounded up"
TAKEN_FROM_NT3 = (
    "loading in a job, the broadcast overhead and the rest: they are taken from NT3, the first two"
    " in proportion to the loading of one process (Table 3)"
)
NO_ENERGY = "power and energy are printed only as {}, so no energy is predicted"
MISSING = {
    "nt3": (
        "start-up, preprocessing and evaluation: they follow from the largest gain under weak"
        " scaling (52.44 %), if that is on the fewest GPUs; without it they would be 0 or more",
        "the time per epoch on 3,072 GPUs is only said to be more than 3 times that on 1",
        "the broadcast overhead is printed for 384 and 768 GPUs; elsewhere the nearer one stands",
        "whether the 153 s of loading on 384 GPUs include the broadcast of 43 s that follows",
        NO_ENERGY.format("changes"),
    ),
    "p1b1": (
        "the time per epoch: it follows from the gains under weak scaling (75.24 to 79.50 %)",
        TAKEN_FROM_NT3,
        "the paper runs P1B1 with at least 4 epochs per GPU, so on at most 96 GPUs",
        NO_ENERGY.format("savings"),
    ),
    "p1b2": (
        "the time per epoch: it follows from the gains under weak scaling (48.63 to 56.62 %)",
        TAKEN_FROM_NT3,
        NO_ENERGY.format("savings"),
    ),
}
"""What the paper does not print, and what stands for it. P1B3 trains one epoch with batches that
grow with the ranks, of which no time is printed."""


def forecast_tables(found: Mapping[str, Any]) -> Iterator[ReportTable]:
    """Yields the forecasts, the best numbers of ranks, and the checks of `forecast_runs`."""
    title = found["title"]
    note = INTERVAL if found["confidence"] else SPAN
    if found["as_it_is"]:
        yield to_table("as-it-is", f"{title}, as it is", _rows(found["as_it_is"]), note)
        title = f"{title}, {found['changes']}"
    yield to_table("forecast", title, _rows(found["points"]), note)
    names = {
        "most ranks with a scaling efficiency of 70 %": "efficient_ranks",
        "ranks of least energy": "least_energy_ranks",
        "ranks of least energy times time": "least_energy_delay_ranks",
    }
    rows = [
        {"series": each["series"]}
        | {heading: _whole(each[name]) for heading, name in names.items()}
        for each in found["best"]
    ]
    most = max(each["searched"][-1] for each in found["best"])
    yield to_table("best", f"The best scale, of up to {count(most, 'rank')}", rows)
    if found["checks"]:
        rows = [
            {
                "ranks": each["ranks"],
                "printed (%)": f"{each['printed_percent']:.2f}",
                "predicted (%)": each["predicted_percent"],
                "difference (points)": each["predicted_percent"]["value"] - each["printed_percent"],
                "note": each["note"],
            }
            for each in found["checks"]
        ]
        title = "The gain in time that the paper prints, and what follows from its other numbers"
        yield to_table("checks", title, rows)


def _rows(points: Sequence[Mapping[str, Any]]) -> list[Row]:
    rows = []
    for point in points:
        notes = [] if point["can_run"] else [UNEQUAL]
        notes += ["not measured"] if point["extrapolation"] > 1 else []
        rows.append(forecast_row(point) | {"note": ", ".join(notes)})
    return rows


def _whole(interval: Mapping[str, float] | None) -> dict[str, int] | None:
    return {name: int(num) for name, num in interval.items()} if interval else None


def _forecast(
    title: str,
    source_of: Callable[[Changes], Mapping[str, ForecastSource]],
    ranks: Sequence[int],
    changes: Changes,
    base: str,
    **more: Any,
) -> dict[str, Any]:
    sources = source_of(changes)
    is_changed = changes != Changes()
    return {
        "title": title,
        "changes": str(changes),
        "confidence": next(iter(sources.values())).confidence,
        "gains_relative_to": base,
        "points": forecast(sources, ranks, base),
        "best": [best_scale(name, source, ranks) for name, source in sources.items()],
        "as_it_is": forecast(source_of(Changes()), ranks, base) if is_changed else None,
        "notes": [],
        "published": [],
        "checks": [],
    } | more


def forecast_runs(
    runs: Sequence[Run],
    benchmark: str,
    modes: Sequence[str],
    ranks: Sequence[int],
    changes: Changes,
    ranks_per_node: int | None = None,
    allreduce_s: Callable[[JobShape], float] | None = None,
) -> list[dict[str, Any]]:
    """Returns forecasts from records, as JSON, one for each mode of strong, weak and batch.

    Args:
        runs: The runs.
        benchmark: Its name.
        modes: Those that are wanted.
        ranks: The numbers of ranks.
        changes: What is changed.
        ranks_per_node: The ranks that fill a node; None if it is that of the runs.
        allreduce_s: Returns the measured time of averaging the gradients of a step once, in s.

    Returns:
        ``title``, ``changes``, ``confidence`` (None for spans of readings), ``gains_relative_to``
        (a series), ``points`` as `forecast` returns them and ``as_it_is`` without the changes,
        ``best`` of `best_scale`, ``notes``, and of the paper the gains that are ``published`` and,
        as ``checks``, those that the forecast is not made from, with what is predicted.

    Raises:
        ModelError: There are no runs of the benchmark, or too few.
    """
    found, reasons = [], []
    for experiment in group(runs):
        if experiment.benchmark != benchmark or experiment.mode not in modes:
            continue
        modelled, missing = model_experiment(experiment, allreduce_s, ranks_per_node)
        lacking = [f"{name}: {reason}" for name, reason in missing]
        reasons += lacking
        if not modelled:
            continue
        names = [each.name for each in modelled]
        originals = [e.name for e in modelled if e.settings.get("loader") == ORIGINAL_LOADER]
        base = next(iter(originals), names[0] if len(names) > 1 else "")
        notes = [fitted_words(modelled), *lacking]
        notes += [
            f"{each.name}: {fit.name} is badly fitted; held-out runs are missed by"
            f" {percent(fit.held_out or 0)}"
            for each in modelled
            for fit in each.model.phases
            if fit.is_bad
        ]
        title = f"{benchmark.upper()}, {MODES[experiment.mode]}, on {experiment.machine}"

        def source_of(changed: Changes, each_of: Any = modelled) -> dict[str, ForecastSource]:
            return {each.name: each.source(changed) for each in each_of}

        found.append(_forecast(title, source_of, ranks, changes, base, notes=notes))
    if not found:
        known = sorted({run["benchmark"] for run in runs if run["is_timed"]})
        raise ModelError(
            "; ".join(reasons)
            or f"--from: there is no finished run of {benchmark} with {listed(list(modes))}"
            f" scaling; there are runs of {listed(known) or 'no benchmark'}"
        )
    return found


def forecast_paper(
    benchmark: str, modes: Sequence[str], ranks: Sequence[int], changes: Changes
) -> list[dict[str, Any]]:
    """Returns forecasts of the paper's runs on Summit, from what the paper prints.

    Raises:
        ModelError: The paper prints too little.
        ParameterError: It prints nothing about what is changed.
    """
    inputs = paper_inputs(benchmark)
    base = f"loader {ORIGINAL_LOADER}"
    found = []
    for mode in modes:

        def source_of(changed: Changes, mode: str = mode) -> dict[str, ForecastSource]:
            return {
                f"loader {loader}": paper_source(inputs, mode, loader, changed)
                for loader in (ORIGINAL_LOADER, METHOD_LOADER)
            }

        notes = [
            "Nothing here was measured: it follows from numbers that the paper prints, which are"
            " listed below. Low and high are the ends of the span of all ways to read them.",
            *(f"not printed: {each}" for each in MISSING[benchmark]),
            *(f"used: {each}" for each in inputs_used(benchmark)),
        ]
        checks = gains_to_check(benchmark, mode)
        for each in checks:
            point = forecast(source_of(Changes()), [each["ranks"]], base)[-1]
            each["predicted_percent"] = point["gain_percent"]
        published = [str(each) for each in _stated(benchmark, mode, "improvement_total_s")]
        title = f"{benchmark.upper()} on {MACHINE}, {MODES[mode]}, from published values"
        more = {"notes": notes, "published": published, "checks": checks}
        found.append(_forecast(title, source_of, ranks, changes, base, **more))
    return found


def paper_inputs(benchmark: str) -> PaperInputs:
    """Returns what the paper prints about a benchmark on Summit.

    Raises:
        ModelError: It does not print enough.
    """
    if benchmark not in MISSING:
        raise ModelError(
            f"the paper prints too little about {benchmark} on {MACHINE} for a model: choose one of"
            f" {', '.join(MISSING)}, or give runs with --from"
        )
    (gains,) = _stated(benchmark, WEAK, "improvement_total_s")
    (of_nt3,) = _stated("nt3", WEAK, "improvement_total_s")
    (weak_epochs,) = _stated("", WEAK, "epochs_per_rank")
    loading = {
        loader: sum(
            each.seconds
            for each in published_loading(benchmark)
            if (each.machine, each.loader) == (MACHINE, loader)
        )
        for loader in LoaderTimes._fields
    }
    common: Any = {
        "loading": LoaderTimes(**loading),
        "epochs": int(published_table_1(benchmark)["epochs"]),
        "weak_epochs": weak_epochs.value,
        "weak_gains": (gains.value, gains.to),
        "most_ranks": of_nt3.num_ranks,
    }
    if benchmark != "nt3":
        return PaperInputs(**common, nt3=paper_inputs("nt3"))
    # On one rank, the time of an epoch under weak scaling is more precise. The last is a bound.
    *times, last = _stated("nt3", STRONG, "epoch_s") + _stated("nt3", WEAK, "epoch_s")
    epochs_s: dict[Any, Any] = {each.num_ranks: each.value for each in times}
    epochs_s[last.num_ranks] = _number(last) * epochs_s[1]
    overheads: dict[Any, Any] = {}
    for mode in PAPER_MODES:
        for each in _stated("nt3", mode, "broadcast_overhead_s"):
            overheads.setdefault(each.num_ranks, {})[each.loaders[0]] = each.value
    (load,) = _stated("nt3", STRONG, "load_s")
    return PaperInputs(
        **common,
        epochs_s=epochs_s,
        at_least=last.num_ranks or 0,
        loading_in_job_s=_number(load),
        broadcasts_s={ranks: LoaderTimes(**times) for ranks, times in overheads.items()},
    )


def inputs_used(benchmark: str) -> list[str]:
    """Returns the published values that the model of a benchmark is made from, in words."""
    cells = {
        name: [e for e in all_published() if (e.section, e.benchmark) == ("Table 3", name)]
        for name in (benchmark, "nt3")
    }
    used = list(map(str, cells[benchmark]))
    if benchmark != "nt3":
        used += map(str, (*_stated(benchmark, WEAK, "improvement_total_s"), *cells["nt3"]))
    gains = _stated("nt3", WEAK, "improvement_total_s")
    used += [f"{each}; of these, only the largest" for each in gains]
    for mode in PAPER_MODES:
        for quantity in ("epoch_s", "load_s", "broadcast_overhead_s"):
            used += map(str, _stated("nt3", mode, quantity))
    return used


def gains_to_check(benchmark: str, mode: str) -> list[dict[str, Any]]:
    """Returns the gains that a prediction is not made from: ranks, printed_percent and note.

    Under strong scaling the paper prints the largest gain, "up to" which it improves; that is on
    the most ranks, on which loading has the largest share. Under weak scaling it prints a range,
    whose lower end is on the most ranks.
    """
    gain = _stated(benchmark, mode, "improvement_total_s")[0]
    if mode == WEAK and benchmark != "nt3":
        return []  # both ends are inputs
    most = gain.num_ranks or _stated("nt3", STRONG, "improvement_total_s")[0].num_ranks
    notes = {most: ""}
    for each in _stated(benchmark, "any", "epochs_to_run") if mode == STRONG else ():
        notes = {
            each.num_ranks: "the most GPUs on which the paper runs it",
            most: f"the paper runs it on at most {each.num_ranks}",
        }
    return [
        {"ranks": ranks, "printed_percent": gain.value, "note": note}
        for ranks, note in notes.items()
    ]


def _stated(benchmark: str, mode: str, quantity: str) -> list[Published]:
    wanted = (benchmark, MACHINE, mode, quantity, "section")
    return [
        each
        for each in all_published()
        if wanted
        == (each.benchmark, each.machine, each.mode, each.quantity, each.section.split()[0])
    ]


def _number(each: Published) -> float:
    assert isinstance(each.value, (int, float))
    return float(each.value)
