"""What the paper prints for its runs on Summit, as the inputs of a model: out of published.toml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from candle_p1.errors import ModelError
from candle_p1.modelling.paper import LoadingTimes, PaperInputs, check_inputs
from candle_p1.reports.published import (
    METHOD_LOADER,
    ORIGINAL_LOADER,
    Published,
    all_published,
    published_loading,
    published_table_1,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MACHINE = "Summit"
BENCHMARKS = ("nt3", "p1b1", "p1b2")
"""P1B3 trains one epoch with batches that grow with the ranks, of which no time is printed."""

MISSING = {
    "nt3": (
        "start-up, preprocessing and evaluation: they follow from the largest gain under weak"
        " scaling (52.44 %), if that is on the fewest GPUs; without it they would be 0 or more",
        "the time per epoch on 3,072 GPUs is only said to be more than 3 times that on 1",
        "the broadcast overhead is printed for 384 and 768 GPUs; elsewhere the nearer one stands",
        "whether the 153 s of loading on 384 GPUs include the broadcast of 43 s that follows",
        "power and energy are printed only as changes, so no energy is predicted",
    ),
    "p1b1": (
        "the time per epoch: it follows from the gains under weak scaling (75.24 to 79.50 %)",
        "loading in a job, the broadcast overhead and the rest: they are taken from NT3, the first"
        " two in proportion to the loading of one process (Table 3)",
        "the paper runs P1B1 with at least 4 epochs per GPU, so on at most 96 GPUs",
        "power and energy are printed only as savings, so no energy is predicted",
    ),
    "p1b2": (
        "the time per epoch: it follows from the gains under weak scaling (48.63 to 56.62 %)",
        "loading in a job, the broadcast overhead and the rest: they are taken from NT3, the first"
        " two in proportion to the loading of one process (Table 3)",
        "power and energy are printed only as savings, so no energy is predicted",
    ),
}
"""What the paper does not print, and what stands for it, by benchmark."""


def paper_inputs(benchmark: str) -> PaperInputs:
    """Returns what the paper prints about a benchmark on Summit.

    Raises:
        ModelError: It does not print enough.
    """
    if benchmark not in BENCHMARKS:
        raise ModelError(
            f"the paper prints too little about {benchmark} on {MACHINE} for a model: choose one of"
            f" {', '.join(BENCHMARKS)}, or give runs with --from"
        )
    nt3 = None if benchmark == "nt3" else paper_inputs("nt3")
    table = published_table_1(benchmark)
    weak_epochs = next(
        each
        for each in all_published()
        if each.quantity == "epochs_per_rank" and each.mode == "weak"
    )
    gains = _one(benchmark, "weak", "improvement_total_s")
    most = _one("nt3", "weak", "improvement_total_s").num_ranks or 0
    inputs = PaperInputs(
        benchmark,
        LoadingTimes(*(_loading_s(benchmark, each) for each in (ORIGINAL_LOADER, METHOD_LOADER))),
        int(table["epochs"]),
        int(weak_epochs.value or 0),
        (_number(gains.value), _number(gains.to)),
        most,
        nt3,
        **({} if nt3 else _nt3_inputs()),
    )
    check_inputs(inputs)
    return inputs


def _nt3_inputs() -> dict[str, Any]:
    epochs_s: dict[int, float] = {}
    at_least = 0
    for each in _stated("nt3", "strong", "epoch_s"):
        epochs_s[each.num_ranks or 0] = _number(each.value)
    for each in _stated("nt3", "weak", "epoch_s"):  # which is more precise for one rank
        if each.unit == "times":
            at_least = each.num_ranks or 0
            epochs_s[at_least] = _number(each.value) * epochs_s[1]
        else:
            epochs_s[each.num_ranks or 0] = _number(each.value)
    broadcasts_s: dict[int, dict[str, float]] = {}
    for mode in ("strong", "weak"):
        for each in _stated("nt3", mode, "broadcast_overhead_s"):
            (loader,) = each.loaders
            broadcasts_s.setdefault(each.num_ranks or 0, {})[loader] = _number(each.value)
    return {
        "epochs_s": epochs_s,
        "at_least": at_least,
        "loading_in_job_s": _number(_one("nt3", "strong", "load_s").value),
        "broadcasts_s": {
            ranks: LoadingTimes(times[ORIGINAL_LOADER], times[METHOD_LOADER])
            for ranks, times in broadcasts_s.items()
        },
    }


def inputs_used(benchmark: str) -> list[str]:
    """Returns the published values that the model of a benchmark is made from, in words."""
    used = list(map(str, _cells(benchmark)))
    if benchmark != "nt3":
        used += map(str, (*_stated(benchmark, "weak", "improvement_total_s"), *_cells("nt3")))
    used += [f"{each}; of these, only the largest" for each in gains_beside("nt3", "weak")]
    for mode in ("strong", "weak"):
        for quantity in ("epoch_s", "load_s", "broadcast_overhead_s"):
            used += map(str, _stated("nt3", mode, quantity))
    return used


@dataclass(frozen=True)
class PrintedGain:
    """A gain in time that the paper prints, and that its model is not made from.

    Attributes:
        benchmark: The benchmark.
        mode: strong or weak.
        num_ranks: The number of ranks of the gain.
        percent: The gain.
        note: What to know of the number of ranks.
    """

    benchmark: str
    mode: str
    num_ranks: int
    percent: float
    note: str = ""


def gains_to_check(benchmark: str, mode: str) -> list[PrintedGain]:
    """Returns the gains that a prediction can be checked by.

    Under strong scaling the paper prints the largest gain, "up to" which it improves; that is on
    the most ranks, on which loading has the largest share. Under weak scaling it prints a range,
    whose lower end is on the most ranks.
    """
    gain = gains_beside(benchmark, mode)[0]
    if mode == "weak":
        if benchmark != "nt3":
            return []  # both ends are inputs
        return [PrintedGain(benchmark, mode, gain.num_ranks or 0, _number(gain.value))]
    percent = _number(gain.value)
    most = _one("nt3", "strong", "improvement_total_s").num_ranks or 0
    found = [PrintedGain(benchmark, mode, most, percent)]
    for each in _stated(benchmark, mode, "epochs_to_run", any_mode=True):
        limit = each.num_ranks or most
        found = [
            PrintedGain(
                benchmark, mode, limit, percent, "the most GPUs on which the paper runs it"
            ),
            PrintedGain(benchmark, mode, most, percent, f"the paper runs it on at most {limit}"),
        ]
    return found


def gains_beside(benchmark: str, mode: str) -> list[Published]:
    """Returns the gains in time that the paper prints for a benchmark and mode."""
    return list(_stated(benchmark, mode, "improvement_total_s"))


def _cells(benchmark: str) -> list[Published]:
    return [
        each
        for each in all_published()
        if each.section == "Table 3" and each.benchmark == benchmark
    ]


def _loading_s(benchmark: str, loader: str) -> float:
    cells = [each for each in published_loading(benchmark) if each.machine == MACHINE]
    return sum(each.seconds for each in cells if each.loader == loader)


def _stated(
    benchmark: str, mode: str, quantity: str, *, any_mode: bool = False
) -> Iterator[Published]:
    modes = (mode, "any") if any_mode else (mode,)
    for each in all_published():
        where = (each.benchmark, each.machine, each.quantity, each.section.split()[0])
        if where == (benchmark, MACHINE, quantity, "section") and each.mode in modes:
            yield each


def _one(benchmark: str, mode: str, quantity: str) -> Published:
    found = list(_stated(benchmark, mode, quantity))
    if not found:
        raise ModelError(f"published.toml has no {quantity} of {benchmark}, {mode}, {MACHINE}")
    return found[0]


def _number(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise ModelError(f"published.toml has {value!r} where a number is needed")
    return float(value)
