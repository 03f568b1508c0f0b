"""The sentences of a report: each from planted numbers, and refused where these are missing."""

from __future__ import annotations

import pytest

from candle_p1.reports.findings.registry import FINDERS, find
from candle_p1.reports.points import group
from candle_p1.reports.runs import RecordedRun
from candle_p1.reports.statistics import Estimate, estimate_median, estimate_ratio
from candle_p1.reports.words import cell, interval, listed, number
from tests.planted_records import planted_record


def statements_on(*records):
    (experiment,) = group([RecordedRun(i, record) for i, record in enumerate(records)])
    return {statement.what: statement for statement in find(experiment)}


def study(benchmark="nt3", loads=(("original", 20.0), ("parallel", 1.0)), **kwargs):
    """Returns records of both loaders on 1, 2 and 4 ranks, three times each."""
    return [
        planted_record(
            benchmark, num, loader=loader, load_s=load_s, rng_seed=seed, **{"epochs": 32} | kwargs
        )
        for num in (1, 2, 4)
        for loader, load_s in loads
        for seed in (0, 1, 2)
    ]


def test_all_is_refused_with_a_reason_where_there_is_one_run():
    statements = statements_on(planted_record("nt3", 1, epochs=8))
    lacking = {what: each.lacking for what, each in statements.items() if not each.sentences}
    assert lacking == {
        "Total time against the original": "no two series differ in the loader or the kernels"
        " alone, one of them the original",
        "Energy against the original": "energy was measured in none of 1 runs",
        "Epochs per worker": "no run evaluated its model (--eval_bool False)",
        "Scaling of the batch size": "no runs differ in --batch_scaling",
        "Speed-up": "no series was run on two numbers of workers",
        "Time per epoch": "no series was run on two numbers of workers",
        "Loaders": "all runs used the same loader",
        "Other settings": "no other setting was varied",
    }
    assert len(statements) == len(FINDERS)


def test_what_dominates_is_said_by_scale():
    (original, parallel) = statements_on(*study())["What dominates"].sentences
    assert original == (
        "loader original: the most time goes into training on 1 worker (59 % of the total time, 3"
        " runs), data loading on 2 and 4 workers (51 to 63 % of the total time, 6 runs)."
    )
    assert parallel == (
        "loader parallel: the most time goes into training on 1, 2 and 4 workers (68 to 89 % of the"
        " total time, 9 runs)."
    )


def test_series_that_agree_share_a_sentence():
    records = [*study(batch_size=20), *study(batch_size=40)]
    sentences = statements_on(*records)["What dominates"].sentences
    assert len(sentences) == 2
    assert sentences[0].startswith(
        "loader original, batch_size 20; loader original, batch_size 40:"
    )


def test_the_improvement_has_interval_pairs_and_the_published_value():
    statement = statements_on(*study())["Total time against the original"]
    assert statement.sentences == (
        "Total time of loader parallel against loader original: over all numbers of workers"
        " improved by 48.1 % (95 % interval 34.2 to 60.3, 9 pairs); the most on 4 workers, improved"
        " by 60.3 % (90 % interval 60.3 to 60.3, 3 against 3 runs: too few for 95 %).",
    )
    assert statement.published[0] == (
        "published (Summit, section 5.1, Figure 11): total time improved by up to 67.68 %"
    )


def test_what_is_within_the_noise_is_not_claimed():
    records = [
        planted_record("nt3", 1, loader=loader, load_s=load_s, epochs=8, rng_seed=seed)
        for loader, offset in (("original", 0.0), ("parallel", 0.1))
        for seed, load_s in enumerate((2 + offset, 3 - offset, 2.5, 2.6, 2.2 + offset, 2.4))
    ]
    (sentence,) = statements_on(*records)["Total time against the original"].sentences
    assert sentence.count("an improvement is not shown") == 2


def test_what_is_worse_is_called_so():
    records = [
        planted_record("nt3", 1, loader=loader, load_s=load_s, epochs=8, rng_seed=seed)
        for loader, load_s in (("original", 1.0), ("parallel", 5.0))
        for seed in range(6)
    ]
    (sentence,) = statements_on(*records)["Total time against the original"].sentences
    assert "worsened by 32" in sentence
    assert "it is worse" in sentence


def test_energy_is_said_as_time_is():
    records = study(energy_j=100.0)
    for record in records:
        if record["parameters"]["loader"]["value"] == "original":
            record["energy"]["total_j"] = 200.0
    statement = statements_on(*records)["Energy against the original"]
    assert "over all numbers of workers improved by 50.0 % (95 % interval" in statement.sentences[0]
    for record in records:
        record["energy"]["kind"] = "simulated"
    (sentence,) = statements_on(*records)["Energy against the original"].sentences
    assert sentence.startswith("Energy (simulated) of loader parallel")


def test_a_speedup_names_its_base_in_seconds():
    sentences = statements_on(*study())["Speed-up"].sentences
    assert sentences[0] == (
        "loader original: on 4 workers the speed-up of the total time is 1.762 (90 % interval 1.762"
        " to 1.762, 3 against 3 runs: too few for 95 %), an efficiency of 0.440, against 55.5 s on"
        " 1 worker."
    )
    records = [record for record in study() if record["num_ranks"] > 1]
    sentences = statements_on(*records)["Speed-up"].sentences
    assert sentences[0].endswith("39.5 s on 2 workers, as there is no run on 1 worker.")


def epochs_study(benchmark, accuracies, **kwargs):
    return [
        planted_record(
            benchmark,
            num,
            epochs=epochs,
            epochs_scaling="weak",
            quality={"accuracy": accuracy},
            rng_seed=seed,
            **kwargs,
        )
        for num in (1, 2)
        for seed in (0, 1, 2)
        for epochs, accuracy in accuracies.items()
    ]


@pytest.mark.parametrize(
    ("benchmark", "accuracies", "said"),
    [
        (
            "nt3",
            {2: 0.6, 4: 0.8, 8: 1.0, 16: 1.0},
            "Test accuracy falls below 8 epochs per worker, as published: at 4 by 0.200"
            " (95 % interval 0.200 to 0.200, 6 against 12 runs).",
        ),
        (
            "nt3",
            {2: 0.6, 4: 1.0, 8: 1.0},
            "Test accuracy falls, but not right below 8 epochs per worker, other than published: at"
            " 2 by 0.400 (95 % interval 0.400 to 0.400, 6 against 6 runs); at 4 the difference is 0"
            " (95 % interval 0 to 0, 6 against 6 runs).",
        ),
        (
            "p1b2",
            {4: 0.34, 16: 0.35},
            "Test accuracy does not fall below 16 epochs per worker by the 0.05 that would count,"
            " other than published: at 4 the difference is -0.0100 (95 % interval -0.0100 to"
            " -0.0100, 6 against 6 runs).",
        ),
    ],
)
def test_epochs_per_worker_are_held_against_the_published_number(benchmark, accuracies, said):
    statement = statements_on(*epochs_study(benchmark, accuracies))["Epochs per worker"]
    assert statement.sentences == (said,)
    assert statement.published


def test_a_loss_is_held_against_the_most_epochs_where_the_paper_names_none():
    losses = {1: 0.05, 4: 0.0402, 8: 0.04}
    records = [
        planted_record(
            "p1b1",
            1,
            epochs=epochs,
            epochs_scaling="weak",
            quality={"loss": loss},
            rng_seed=seed,
        )
        for seed in range(4)
        for epochs, loss in losses.items()
    ]
    statement = statements_on(*records)["Epochs per worker"]
    assert statement.sentences == (
        "Test loss rises, but not right below 8 epochs per worker: at 1 by 0.0100 (95 % interval"
        " 0.0100 to 0.0100, 4 against 4 runs); at 4 the difference is 0.00020 (95 % interval"
        " 0.00020 to 0.00020, 4 against 4 runs).",
    )
    assert "as published" not in statement.sentences[0]
    for record in records:
        record["quality"]["loss"]["value"] = min(record["quality"]["loss"]["value"], 0.0402)
    (said,) = statements_on(*records)["Epochs per worker"].sentences
    assert said.startswith("Test loss does not rise below 8 epochs per worker by the 5 % that")


def test_a_fall_next_to_what_nothing_is_known_of():
    records = epochs_study("nt3", {2: 0.6, 8: 1.0})
    records += epochs_study("nt3", {4: 0.7})[:1]
    (said,) = statements_on(*records)["Epochs per worker"].sentences
    assert said.startswith("Test accuracy falls below 8 epochs per worker, as published: at 2 by")
    assert said.endswith("too few for 95 %), which decides nothing.")


def test_models_that_diverged_prove_nothing():
    records = epochs_study("nt3", {4: 1.0, 8: 1.0})
    records[0]["quality"]["accuracy"]["value"] = None
    statement = statements_on(*records)["Epochs per worker"]
    assert statement.sentences == ()
    assert "the models of 1 run diverged" in statement.lacking


def test_accuracies_that_scatter_decide_nothing():
    records = [
        planted_record("nt3", 1, epochs=epochs, quality={"accuracy": accuracy}, rng_seed=seed)
        for epochs in (4, 8)
        for seed, accuracy in enumerate((0.4, 0.5, 0.6, 0.8, 0.9, 1.0))
    ]
    statement = statements_on(*records)["Epochs per worker"]
    assert [text for text in statement.sentences if text.startswith("Test")] == [
        "Test accuracy is not shown to fall below 8 epochs per worker, nor not to: at 4 the"
        " difference is 0 (95 % interval -0.400 to 0.400, 6 against 6 runs)."
    ]


def test_too_few_epochs_or_runs_are_refused():
    few = statements_on(*epochs_study("nt3", {1: 0.6, 4: 0.7}))["Epochs per worker"]
    assert few.sentences == ()
    assert "runs with 8 epochs per worker or more and runs with fewer" in few.lacking
    assert few.lacking.endswith("there are such with 1 and 4")
    single = statements_on(*epochs_study("nt3", {4: 0.6, 8: 0.7})[:2])["Epochs per worker"]
    assert "too few runs for a 95 % interval" in single.lacking


def test_the_best_and_the_fastest_batch_scaling_are_named():
    records = [
        planted_record(
            "p1b3",
            4,
            epochs=1,
            batch_scaling=scaling,
            epoch_s=epoch_s,
            quality={"accuracy": accuracy + 0.002 * seed},
            rng_seed=seed,
        )
        for scaling, epoch_s, accuracy in (
            ("linear", 5, 0.6),
            ("sqrt", 10, 0.63),
            ("cbrt", 15, 0.66),
        )
        for seed in range(4)
    ]
    statement = statements_on(*records)["Scaling of the batch size"]
    assert statement.sentences[0] == (
        "On 4 workers batch_scaling cbrt has the best test accuracy, 0.663; next is batch_scaling"
        " sqrt with 0.633, a difference of 0.0300 (95 % interval 0.0240 to 0.0360, 4 against 4"
        " runs)."
    )
    assert "batch_scaling linear has the shortest total time, 10.50 s" in statement.sentences[1]
    assert any("0.6579 on 48 GPUs with cbrt" in text for text in statement.published)


def test_what_to_change_names_the_measured_gain():
    original, parallel = statements_on(*study())["What to change"].sentences
    assert original == (
        "loader original, on 4 workers: --loader parallel reads every byte once per job; here it"
        " took 60.3 % off the total time (90 % interval 60.3 to 60.3, 3 against 3 runs: too few for"
        " 95 %)."
    )
    assert "as long as each trains the 8 epochs" in parallel
    alone = [record for record in study() if record["data"]["loader"] == "original"]
    (sentence,) = statements_on(*alone)["What to change"].sentences
    assert sentence.endswith("it was not measured here.")


@pytest.mark.parametrize(
    ("kwargs", "advice"),
    [
        ({"startup_s": 100.0}, "nothing in the benchmark"),
        ({"communication_s": 31.0}, "--backward_passes_per_step"),
        ({"epochs": 4, "epoch_s": 99.0}, "4 epochs per worker are already fewer than the 8"),
        ({"wait_s": 100.0, "loader": "cached"}, "--stage_dir"),
    ],
)
def test_advice_follows_from_what_dominates(kwargs, advice):
    kwargs = {"epochs": 32, "num_ranks": 1, "load_s": 0.1} | kwargs
    if "communication_s" in kwargs:
        kwargs |= {"num_ranks": 2, "epochs": 64}
    (sentence,) = statements_on(planted_record("nt3", **kwargs))["What to change"].sentences
    assert advice in sentence


def test_other_settings_are_compared_on_the_most_workers():
    records = [
        planted_record("nt3", num, lr_scaling=scaling, epochs=8, quality={"accuracy": accuracy})
        for num in (1, 2)
        for scaling, accuracy in (("none", 0.8), ("linear", 0.9), ("sqrt", 0.85))
        for _ in range(4)
    ]
    best, shortest = statements_on(*records)["Other settings"].sentences
    assert best.startswith("On 2 workers lr_scaling linear has the best test accuracy, 0.900;")
    assert shortest.endswith("that they differ is not shown.")


def test_numbers_have_three_digits_and_four_after_a_one():
    values = (41.234, 12.345, 0.012345, 1.0, 0.0, -0.0, 12345.6, 0.98765, float("nan"))
    assert [number(value) for value in values] == [
        "41.2", "12.35", "0.0123", "1.000", "0", "0", "12,346", "0.988", "not a number",
    ]  # fmt: skip
    assert [number(value) for value in (0.0063, 0.00042, -0.0000123)] == [
        "0.0063", "0.00042", "-0.000012",
    ]  # fmt: skip
    assert listed([1, 2, 1024]) == "1, 2 and 1,024"


def test_intervals_say_what_they_are():
    assert interval(estimate_median([1.0])) == "no interval, 1 run"
    assert interval(estimate_median([2.0, 3.0])) == "range 2.00 to 3.00, 2 runs"
    assert interval(estimate_median([2.0] * 6)) == "95 % interval 2.00 to 2.00, 6 runs"
    assert interval(estimate_ratio([2.0] * 3, [1.0] * 3)) == (
        "90 % interval 2.00 to 2.00, 3 against 3 runs: too few for 95 %"
    )
    assert cell(estimate_median([2.0])) == "2.00"
    assert cell(estimate_median([2.0, 3.0])) == "2.50 [2.00 to 3.00]"
    assert cell(estimate_median([2.0] * 6)) == "2.00 (2.00 to 2.00)"
    assert cell(estimate_ratio([2.0] * 3, [1.0] * 3)) == "2.00 [2.00 to 2.00; 90 %]"
    assert cell(Estimate(0.5, -0.001, 20.0, 0.95, (6,))) == "0.500 (0.0 to 20.0)"


def test_loaders_are_compared_on_the_same_files():
    records = [
        planted_record("nt3", 1, loader=loader, load_s=load_s, size=size, rng_seed=seed)
        for size, factor in (("small", 0.01), ("full", 1.0))
        for loader, load_s in (("original", 10 * factor), ("dask", 20 * factor))
        for seed in range(4)
    ]
    for record in records:
        size = record["parameters"]["size"]["value"]
        for file in record["data"]["files"].values():
            file["file_bytes"] //= 100 if size == "small" else 1
    statement = statements_on(*records)["Loaders"]
    assert len(statement.sentences) == 2
    for sentence in statement.sentences:
        assert "is slower by a factor of 2.00 (95 % interval 2.00 to 2.00" in sentence
    assert "4.00 MB" in statement.sentences[0]
    assert "0.0400 MB" in statement.sentences[1]


def test_communication_that_was_not_measured_is_not_advised_about():
    records = study()
    for record in records:
        record["phases"]["train"].pop("communication", None)
    statement = statements_on(*records)["What to change"]
    assert any("communication was not measured" in each for each in statement.sentences)


def test_energies_of_different_parts_are_not_compared():
    records = study(energy_j=100.0)
    for record in records[:3]:
        record["energy"]["covers"] = ["cpu", "gpu"]
    statement = statements_on(*records)["Energy against the original"]
    assert statement.sentences == ()
    assert statement.lacking == "energies are of different parts of the machine: cpu and gpu; gpu"
