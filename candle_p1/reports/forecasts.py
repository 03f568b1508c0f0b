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
from candle_p1.reports.model_page import Row, fitted_words, model_experiment, to_table
from candle_p1.reports.published import (
    ORIGINAL_LOADER,
    PAPER_LOADERS,
    all_published,
    content,
    published_loading,
)
from candle_p1.reports.render import ReportTable
from candle_p1.reports.statistics import contents, listed, percent
from candle_p1.text import count

MACHINE = "Summit"
PAPER_MODES = (STRONG, WEAK)
"""The modes of which the paper prints enough for a model."""

UNEQUAL = "the ranks cannot have equal shares of the epochs; rounded up"


def forecast_tables(found: Mapping[str, Any]) -> Iterator[ReportTable]:
    """Yields the forecasts, the best numbers of ranks, and the checks of `forecast_runs`."""
    title = found["title"]
    ends = contents()["tables"]["interval" if found["confidence"] else "span"]
    if found["as_it_is"]:
        yield to_table("as-it-is", _noted(found["as_it_is"]), title=title, ends=ends)
        title = f"{title}, {found['changes']}"
    yield to_table("forecast", _noted(found["points"]), title=title, ends=ends)
    most = max(each["searched"][-1] for each in found["best"])
    yield to_table("best", found["best"], most=count(most, "rank"))
    if found["checks"]:
        rows = [c | {"printed_percent": f"{c['printed_percent']:.2f}"} for c in found["checks"]]
        yield to_table("checks", rows)


def _noted(points: Sequence[Row]) -> list[Row]:
    return [each | {"note": "" if each["can_run"] else UNEQUAL} for each in points]


def _forecast(
    title: str,
    sources: Mapping[str, ForecastSource],
    unchanged: Mapping[str, ForecastSource],
    ranks: Sequence[int],
    changes: Changes,
    base: str,
    **more: Any,
) -> dict[str, Any]:
    return {
        "title": title,
        "changes": str(changes),
        "confidence": next(iter(sources.values())).confidence,
        "gains_relative_to": base,
        "points": forecast(sources, ranks, base),
        "best": [best_scale(name, source, ranks) for name, source in sources.items()],
        "as_it_is": None if changes == Changes() else forecast(unchanged, ranks, base),
        **({"published": [], "checks": []} | more),
    }


def forecast_runs(
    runs: Sequence[Run],
    benchmark: str,
    modes: Sequence[str],
    ranks: Sequence[int],
    changes: Changes,
    ranks_per_node: int | None = None,
    allreduce_s: Callable[[JobShape], float] | None = None,
) -> list[dict[str, Any]]:
    """Returns forecasts from records, as JSON, for each of the modes strong, weak and batch.

    As many ranks as in the runs fill a node, but for `ranks_per_node`. `allreduce_s` returns the
    measured time of averaging the gradients of a step once, in s.

    Returns:
        ``title``, ``changes``, ``confidence`` (None for spans of readings), ``gains_relative_to``
        (a series), ``points`` as `forecast` returns them and ``as_it_is`` without the changes,
        ``best`` of `best_scale`, ``notes``, and of the paper the gains that are ``published`` and,
        as ``checks``, those that the forecast is not made from, with what is predicted.

    Raises:
        ModelError: There are no runs of the benchmark, or too few.
    """
    found, reasons = [], []
    wanted = [each for each in group(runs) if each.benchmark == benchmark and each.mode in modes]
    for experiment in wanted:
        modelled, missing = model_experiment(experiment, allreduce_s, ranks_per_node)
        unmodelled = [f"{name}: {reason}" for name, reason in missing]
        reasons += unmodelled
        if not modelled:
            continue
        originals = [e.name for e in modelled if e.series.settings.get("loader") == ORIGINAL_LOADER]
        base = next(iter(originals), modelled[0].name if len(modelled) > 1 else "")
        notes = [fitted_words(modelled), *unmodelled]
        notes += [
            f"{each.name}: {fit.name} is badly fitted; held-out runs are missed by"
            f" {percent(fit.held_out or 0)}"
            for each in modelled
            for fit in each.model.phases
            if fit.is_bad
        ]
        title = f"{benchmark.upper()}, {MODES[experiment.mode]}, on {experiment.machine}"
        sources, unchanged = (
            {e.name: e.source(each) for e in modelled} for each in (changes, Changes())
        )
        found.append(_forecast(title, sources, unchanged, ranks, changes, base, notes=notes))
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
    for mode in [each for each in modes if each in PAPER_MODES]:
        sources, unchanged = (
            {f"loader {name}": paper_source(inputs, mode, name, each) for name in PAPER_LOADERS}
            for each in (changes, Changes())
        )
        notes = [
            contents()["forecast"]["paper"],
            *(f"not printed: {each}" for each in content()["not_printed"][benchmark]),
            *(f"used: {each}" for each in inputs_used(benchmark)),
        ]
        checks = gains_to_check(benchmark, mode)
        for each in checks:
            predicted = forecast(unchanged, [each["ranks"]], base)[-1]["gain_percent"]
            difference = predicted["value"] - each["printed_percent"]
            each |= {"predicted_percent": predicted, "difference_in_points": difference}
            each["note"] = each.pop("note")  # the last column
        published = [str(each) for each in _stated(benchmark, mode, "improvement_total_s")]
        title = f"{benchmark.upper()} on {MACHINE}, {MODES[mode]}, from published values"
        more = {"notes": notes, "published": published, "checks": checks}
        found.append(_forecast(title, sources, unchanged, ranks, changes, base, **more))
    return found


def paper_inputs(benchmark: str) -> PaperInputs:
    """Returns what the paper prints about a benchmark on Summit.

    Raises:
        ModelError: It does not print enough.
    """
    if benchmark not in content()["not_printed"]:
        raise ModelError(
            f"the paper prints too little about {benchmark} on {MACHINE} for a model: choose one of"
            f" {', '.join(content()['not_printed'])}, or give runs with --from"
        )
    (gains,) = _stated(benchmark, WEAK, "improvement_total_s")
    cells = [each for each in published_loading(benchmark) if each.machine == MACHINE]
    common: Any = {
        "loading": LoaderTimes(
            *(sum(e.seconds for e in cells if e.loader == name) for name in LoaderTimes._fields)
        ),
        "epochs": int(content()["table_1"][benchmark]["epochs"]),
        "weak_epochs": _stated("", WEAK, "epochs_per_rank")[0].value,
        "weak_gains": (gains.value, gains.to),
        "most_ranks": _stated("nt3", WEAK, "improvement_total_s")[0].num_ranks,
    }
    if benchmark != "nt3":
        return PaperInputs(**common, nt3=paper_inputs("nt3"))
    # On one rank, the time of an epoch under weak scaling is more precise. The last is a bound.
    *times, last = _stated("nt3", STRONG, "epoch_s") + _stated("nt3", WEAK, "epoch_s")
    epochs_s = {each.num_ranks: each.value for each in times}
    overheads: dict[int, dict[str, float]] = {}
    for mode in PAPER_MODES:
        for each in _stated("nt3", mode, "broadcast_overhead_s"):
            overheads.setdefault(each.num_ranks, {})[each.loaders[0]] = each.value
    return PaperInputs(
        **common,
        epochs_s=epochs_s | {last.num_ranks: last.value * epochs_s[1]},
        at_least=last.num_ranks,
        loading_in_job_s=_stated("nt3", STRONG, "load_s")[0].value,
        broadcasts_s={ranks: LoaderTimes(**times) for ranks, times in overheads.items()},
    )


def inputs_used(benchmark: str) -> list[str]:
    """Returns the published values that the model of a benchmark is made from, in words."""
    used = []
    for name in dict.fromkeys((benchmark, "nt3")):
        cells = [e for e in all_published() if (e.section, e.benchmark) == ("Table 3", name)]
        gains = _stated(name, WEAK, "improvement_total_s")
        used += [*map(str, cells)]
        used += [f"{e}{'; of these, only the largest' * (name == 'nt3')}" for e in gains]
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
        notes = {each.num_ranks: "the most GPUs on which the paper runs it"}
        notes[most] = f"the paper runs it on at most {each.num_ranks}"
    return [{"ranks": p, "printed_percent": gain.value, "note": note} for p, note in notes.items()]


def _stated(benchmark: str, mode: str, quantity: str) -> list[Any]:
    wanted = (benchmark, MACHINE, mode, quantity)
    return [
        each
        for each in all_published()
        if (each.benchmark, each.machine, each.mode, each.quantity) == wanted
        and each.section.startswith("section")
    ]
