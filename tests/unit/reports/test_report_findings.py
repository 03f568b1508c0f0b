"""The statements of a report: made from planted numbers, and refused where these are missing."""

from __future__ import annotations

import pytest
from candle_p1.reports.findings.registry import FINDERS, find
from candle_p1.reports.tables import make_tables

from candle_p1.reports.experiments import group
from candle_p1.reports.frame import Run
from candle_p1.reports.notes import notes_on
from candle_p1.reports.statistics import Estimate, estimate_median, estimate_ratio
from candle_p1.reports.words import cell, interval, listed, number
from tests.planted_records import REMOVED, changed, planted_record

METHOD_TIME, METHOD_ENERGY = (
    f"{what} with the paper's loading" for what in ("Total time", "Energy")
)
TIME_GAIN = "Total time with other loaders and kernels"
ENERGY_GAIN = "Energy with other loaders and kernels"
METHOD_LOADING, LOADING = "The paper's loading", "Other loaders"
THREE_LOADERS = (("original", 20.0), ("chunked", 10.0), ("parallel", 1.0))
EPOCHS = "Epochs per rank"


def statements_on(*records):
    (experiment,) = group([Run(i, record) for i, record in enumerate(records)])
    return {statement.finder.what: statement for statement in find(experiment)}


def check_holds(sentence, *parts):
    """Asserts that a sentence has these parts, in this order."""
    position = 0
    for part in parts:
        assert part in sentence[position:], (part, sentence)
        position = sentence.index(part, position) + len(part)


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


def weak_study(benchmark, name, qualities, seeds=range(3), counts=(1, 2)):
    """Returns records of the qualities of some numbers of epochs per rank."""
    facts = {"benchmark": benchmark, "epochs_scaling": "weak"}
    return [
        planted_record(
            num_ranks=num, epochs=epochs, quality={name: quality}, rng_seed=seed, **facts
        )
        for num in counts
        for seed in seeds
        for epochs, quality in qualities.items()
    ]


def test_a_single_run_supports_few_statements():
    statements = statements_on(planted_record("nt3", 1, epochs=8))
    made = {what for what, each in statements.items() if each.sentences}
    assert made == {"What dominates", "What to change"}
    assert len(statements) == len(FINDERS)
    assert all(each.lacking for what, each in statements.items() if what not in made)


def test_what_dominates_is_stated_by_scale():
    original, parallel = statements_on(*study())["What dominates"].sentences
    assert original == (
        "loader original: the largest part of the time is training on 1 rank (59 % of the total"
        " time, 3 runs), data loading on 2 and 4 ranks (51 to 63 % of the total time, 6 runs)."
    )
    check_holds(parallel, "loader parallel", "training on 1, 2 and 4 ranks (68 to 89 %", "9 runs")


def test_series_that_agree_share_a_sentence():
    records = [*study(batch_size=20), *study(batch_size=40)]
    sentences = statements_on(*records)["What dominates"].sentences
    assert len(sentences) == 2
    assert sentences[0].startswith(
        "loader original, batch_size 20; loader original, batch_size 40:"
    )


def test_the_improvement_has_interval_and_pairs():
    statement = statements_on(*study())[TIME_GAIN]
    assert statement.sentences == (
        "Total time of loader parallel compared with loader original: improved by 48.1 % (95 %"
        " interval 34.2 to 60.3, 9 pairs) over all numbers of ranks.",
    )


def test_published_gains_stand_beside_the_method_of_the_paper_alone():
    records = study(loads=THREE_LOADERS, energy_j=100.0)
    statements = statements_on(*records, *records)
    for what, gain in ((METHOD_TIME, "67.68 %"), (METHOD_LOADING, "at least 5")):
        (sentence, *_) = statements[what].sentences
        assert "chunked" in sentence
        assert "original" in sentence
        assert "parallel" not in " ".join(statements[what].sentences)
        assert any(gain in text for text in statements[what].published)
    against_original, against_chunked = statements[TIME_GAIN].sentences
    check_holds(against_original, "loader parallel compared with loader original: improved by 48.1")
    check_holds(against_chunked, "loader parallel compared with loader chunked: improved by 30.5")
    assert len(statements[LOADING].sentences) == 4
    for what, statement in statements.items():
        if what not in (METHOD_TIME, METHOD_LOADING, METHOD_ENERGY):
            assert "improved" not in " ".join(statement.published), what
            assert "factor" not in " ".join(statement.published), what
    for what in (TIME_GAIN, ENERGY_GAIN, LOADING):
        assert statements[what].published == ()
    assert "original" in statements[METHOD_ENERGY].unsure[0]


def test_without_the_method_of_the_paper_no_gain_is_published():
    statements = statements_on(*study(energy_j=100.0))
    for what in (METHOD_TIME, METHOD_ENERGY, METHOD_LOADING):
        assert (statements[what].sentences, statements[what].published) == ((), ())
        assert "chunked" in statements[what].lacking
    (experiment,) = group([Run(i, each) for i, each in enumerate(study())])
    tables = {table.slug: table for table in make_tables(experiment, "t")}
    assert "t-improvement" not in tables
    assert not any("published" in note for note in tables["t-other-improvement"].notes)
    assert all("loader chunked" not in note for note in tables["t-times"].notes)


def test_the_table_of_the_method_of_the_paper_has_the_published_gains():
    records = study(loads=THREE_LOADERS, batch_size=20) + study(loads=THREE_LOADERS, batch_size=40)
    (experiment,) = group([Run(i, each) for i, each in enumerate(records)])
    tables = {table.slug: table for table in make_tables(experiment, "t")}
    method, other = tables["t-improvement"], tables["t-other-improvement"]
    pairs = {(row[2].split(", ")[0], row[1].split(", ")[0]) for row in method.rows}
    assert pairs == {("loader original", "loader chunked")}
    assert any("67.68 %" in note for note in method.notes)
    pairs = {(row[2].split(", ")[0], row[1].split(", ")[0]) for row in other.rows}
    assert pairs == {(f"loader {name}", "loader parallel") for name in ("original", "chunked")}
    assert not any("published" in note for note in other.notes)
    times = " ".join(tables["t-times"].notes)
    assert "43.72 s on 384 GPUs (loader original)" in times
    assert "4.65 s on 384 GPUs (loader chunked)" in times


@pytest.mark.parametrize(
    ("original_s", "parallel_s", "parts"),
    [
        # within the noise
        ((2.0, 3.0, 2.5, 2.6, 2.2, 2.4), (2.1, 2.9, 2.5, 2.6, 2.3, 2.4), None),
        ((2.0, 2.0, 2.0), (1.0, 1.0, 1.0), None),  # too few
        ((2.0,), (1.0,), None),
        ((1.0,) * 6, (5.0,) * 6, ["worsened by 32", "worsened by 32"]),
    ],
)
def test_only_significant_improvements_are_claimed(original_s, parallel_s, parts):
    records = [
        planted_record("nt3", 1, loader=loader, load_s=load_s, epochs=8, rng_seed=seed)
        for loader, loads_s in (("original", original_s), ("parallel", parallel_s))
        for seed, load_s in enumerate(loads_s)
    ]
    statements = statements_on(*records)
    found, told = statements[TIME_GAIN], statements[LOADING]
    advice = " ".join(statements["What to change"].sentences)
    if parts:
        check_holds(*found.sentences, *parts)
        check_holds(*told.sentences, "slower by a factor of 5.00")
    else:
        assert found.sentences == told.sentences == ()
        check_holds(*found.unsure, "total time of loader parallel", "by ", " %")
        check_holds(*told.unsure, "on 1 rank, loading the train file", "factor")
        assert "improved" not in advice


def test_energy_is_compared_like_time():
    records = [
        changed(record, {"energy.total_j": 200.0})
        if record.parameters["loader"].value == "original"
        else record
        for record in study(energy_j=100.0)
    ]
    (sentence,) = statements_on(*records)[ENERGY_GAIN].sentences
    check_holds(sentence, "improved by 50.0 % (95 % interval")
    records = [changed(record, {"energy.kind": "simulated"}) for record in records]
    (sentence,) = statements_on(*records)[ENERGY_GAIN].sentences
    assert sentence.startswith("Energy (simulated) of loader parallel")


def test_a_speedup_names_its_base_in_seconds():
    sentences = statements_on(*study(), *study())["Speed-up"].sentences
    assert sentences[0] == (
        "loader original: on 4 ranks, the speed-up of the total time is 1.762 (95 % interval 1.762"
        " to 1.762, 6 against 6 runs), a scaling efficiency of 0.440, relative to 55.5 s on 1 rank."
    )
    few = statements_on(*(record for record in study() if record.num_ranks > 1))["Speed-up"]
    assert few.sentences == ()
    check_holds(few.unsure[0], "39.5 s on 2 ranks", "no run")


def test_runs_that_xla_compiled_are_not_compared_with_others_without_saying_so():
    """On GPUs, XLA compiles the step of one rank, but not of several, which use Horovod."""
    words = (
        "XLA compiled the training step (jit_compile) of the runs on 1 rank, and not of the runs on"
        " 2 and 4 ranks"
    )

    def statements_and_notes(compiled_on):
        records = [
            planted_record("nt3", num, epoch_s=s, jit_compile=num in compiled_on)
            for num, s in ((1, 2.0), (2, 2.5), (4, 3.0)) * 4
        ]
        (experiment,) = group([Run(i, each) for i, each in enumerate(records)])
        tables = {table.slug: table for table in make_tables(experiment, "t")}
        found = [*statements_on(*records).values()]
        of_ratios = [s for each in found for s in each.sentences if each.finder.table == "scaling"]
        return of_ratios, notes_on(experiment), tables["t-scaling"].notes

    sentences, notes, of_table = statements_and_notes({1})
    apart = words.replace("2 and 4", "4")
    assert apart in " ".join(sentences)
    assert sum(note.startswith(words) for note in notes) == 1
    assert any(apart in note for note in of_table)
    for alike in ({1, 2, 4}, set()):
        sentences, *notes = statements_and_notes(alike)
        assert sentences
        assert "jit_compile" not in str((sentences, notes))


def test_the_time_per_epoch_is_compared_with_the_fewest_ranks():
    records = [planted_record("nt3", num, epoch_s=s) for num, s in ((1, 2.0), (4, 3.0)) * 4]
    (sentence,) = statements_on(*records)["Time per epoch"].sentences
    check_holds(sentence, "on 4 ranks", "1.500 times", "2.00 s on 1 rank")


@pytest.mark.parametrize(
    ("benchmark", "accuracies", "parts"),
    [
        (
            "nt3",
            {2: 0.6, 4: 0.8, 8: 1.0, 16: 1.0},
            (
                "Test accuracy falls below 8 epochs per rank, as published: at 4 by 0.200",
                "(95 % interval 0.200 to 0.200, 6 against 12 runs).",
            ),
        ),
        (
            "nt3",
            {2: 0.6, 4: 1.0, 8: 1.0},
            (
                "falls, but not immediately",
                "contrary to the paper: at 2 by 0.400 (",
                "at 4,",
                "0 (",
            ),
        ),
        (
            "p1b2",
            {4: 0.34, 16: 0.35},
            ("does not fall by 0.05", "16 epochs", "contrary to the paper: at 4,", "-0.0100 (95 %"),
        ),
    ],
)
def test_epochs_per_rank_are_compared_with_the_published_number(benchmark, accuracies, parts):
    statement = statements_on(*weak_study(benchmark, "accuracy", accuracies))[EPOCHS]
    (sentence,) = statement.sentences
    check_holds(sentence, *parts)
    assert statement.published


def test_a_loss_is_compared_with_the_most_epochs_where_the_paper_names_none():
    losses = {1: 0.05, 4: 0.0402, 8: 0.04}
    records = weak_study("p1b1", "loss", losses, seeds=range(4), counts=(1,))
    (sentence,) = statements_on(*records)[EPOCHS].sentences
    check_holds(sentence, "Test loss rises, but not immediately", "8 epochs", "at 1 by 0.0100 (")
    check_holds(sentence, "at 4,", "0.00020 (95 % interval 0.00020 to 0.00020, 4 against 4 runs)")
    assert "published" not in sentence
    records = weak_study("p1b1", "loss", losses | {1: 0.0402}, seeds=range(4), counts=(1,))
    (sentence,) = statements_on(*records)[EPOCHS].sentences
    check_holds(sentence, "Test loss does not rise by 5 %", "8 epochs")


def test_a_fall_beside_an_inconclusive_difference():
    records = weak_study("nt3", "accuracy", {2: 0.6, 8: 1.0})
    records += weak_study("nt3", "accuracy", {4: 0.7})[:1]
    (sentence,) = statements_on(*records)[EPOCHS].sentences
    check_holds(sentence, "falls below 8 epochs", "as published: at 2 by", "inconclusive.")


def test_models_that_diverged_prove_nothing():
    records = weak_study("nt3", "accuracy", {4: 1.0, 8: 1.0})
    records[0] = changed(records[0], {"quality.accuracy.value": None})
    statement = statements_on(*records)[EPOCHS]
    assert statement.sentences == ()
    assert "1 run diverged" in statement.lacking


def test_scattered_accuracies_decide_nothing():
    records = [
        planted_record("nt3", 1, epochs=epochs, quality={"accuracy": accuracy}, rng_seed=seed)
        for epochs in (4, 8)
        for seed, accuracy in enumerate((0.4, 0.5, 0.6, 0.8, 0.9, 1.0))
    ]
    statement = statements_on(*records)[EPOCHS]
    assert statement.sentences == ()
    check_holds(
        statement.unsure[0], "may or may not fall below 8 epochs", "0 (95 % interval -0.400"
    )


def test_too_few_epochs_or_runs_are_refused():
    few = statements_on(*weak_study("nt3", "accuracy", {1: 0.6, 4: 0.7}))[EPOCHS]
    assert few.sentences == ()
    check_holds(few.lacking, "8 epochs", "1 and 4")
    single = statements_on(*weak_study("nt3", "accuracy", {4: 0.6, 8: 0.7})[:2])[EPOCHS]
    assert "too few runs" in single.lacking


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
    best, fastest = statement.sentences
    assert best == (
        "On 4 ranks, batch_scaling cbrt has the best test accuracy, 0.663; the next is"
        " batch_scaling sqrt with 0.633, a difference of 0.0300 (95 % interval 0.0240 to 0.0360, 4"
        " against 4 runs)."
    )
    check_holds(fastest, "batch_scaling linear has the shortest total time, 10.50 s")
    assert any("0.6579 on 48 GPUs with cbrt" in text for text in statement.published)


def on_many_cores(*records):
    return [changed(record, {"environment.node_cores": 64}) for record in records]


def test_advice_names_the_measured_gain():
    original, parallel = statements_on(*on_many_cores(*study()))["What to change"].sentences
    check_holds(original, "loader original, on 4 ranks", "--loader parallel", "48.1 % (95 %")
    check_holds(parallel, "loader parallel, on 4 ranks", "8 epochs")
    alone = [record for record in study() if record.data.loader == "original"]
    (sentence,) = statements_on(*alone)["What to change"].sentences
    assert "not measured" in sentence


@pytest.mark.parametrize(
    ("kwargs", "advice"),
    [
        ({"startup_s": 100.0}, "nothing in the benchmark"),
        ({"communication_s": 31.0}, "--backward_passes_per_step"),
        ({"epoch_s": 99.0}, "was not measured here"),
        ({"wait_s": 100.0, "loader": "cached"}, "--stage_dir"),
        ({"load_s": 100.0, "loader": "parallel"}, "--loader cached"),
    ],
)
def test_advice_follows_from_what_dominates(kwargs, advice):
    kwargs = {"epochs": 32, "num_ranks": 1, "load_s": 0.1} | kwargs
    if "communication_s" in kwargs:
        kwargs |= {"num_ranks": 2, "epochs": 64}
    records = on_many_cores(planted_record("nt3", **kwargs))
    (sentence,) = statements_on(*records)["What to change"].sentences
    assert advice in sentence


@pytest.mark.parametrize(
    ("kwargs", "seconds", "advice"),
    [
        ({"epochs": 8}, 9.0, "4 epochs per rank are already fewer than the 8"),
        ({"epochs": 32}, 9.0, "the 8 epochs that the paper found necessary"),
        ({"data_parallel": "batch_step"}, 9.0, "as long as the quality is sufficient"),
        ({"epochs": 32}, 28.0, "no reason to use more"),
        ({"epochs": 32, "threads": 32}, 9.0, "already use all cores"),
    ],
)
def test_more_ranks_are_advised_where_they_gained_and_cores_are_free(kwargs, seconds, advice):
    times = {1: 10.0, 2: seconds}
    records = [planted_record("nt3", num, epoch_s=times[num], **kwargs) for num in times]
    (sentence,) = statements_on(*on_many_cores(*records))["What to change"].sentences
    assert advice in sentence
    assert ("use more ranks" in sentence) == (advice.startswith(("the 8", "as long")))


@pytest.mark.parametrize(
    ("limits", "best"),
    [({}, ["lr_scaling linear has the best test accuracy, 0.900;"]), ({"train_steps": 2}, [])],
)
def test_other_settings_are_compared_on_the_most_ranks(limits, best):
    records = [
        planted_record(
            "nt3",
            num,
            lr_scaling=scaling,
            epochs=8,
            quality={"accuracy": accuracy},
            rng_seed=seed,
            **limits,
        )
        for num in (1, 2)
        for scaling, accuracy in (("none", 0.8), ("linear", 0.9), ("sqrt", 0.85))
        for seed in range(4)
    ]
    statement = statements_on(*records)["Other settings"]
    assert len(statement.sentences) == len(best)
    for sentence in statement.sentences:
        check_holds(sentence, "2 ranks", *best)
    check_holds(statement.unsure[-1], "the shortest total time")


def test_numbers_have_three_digits_and_four_after_a_one():
    values = (41.234, 12.345, 0.012345, 1.0, 0.0, -0.0, 12345.6, 0.98765, float("nan"))
    assert [number(value) for value in values] == [
        "41.2", "12.35", "0.0123", "1.000", "0", "0", "12,346", "0.988", "not a number",
    ]  # fmt: skip
    assert [number(value) for value in (0.0063, 0.00042, -0.0000123)] == [
        "0.0063", "0.00042", "-0.000012",
    ]  # fmt: skip
    assert listed([1, 2, 1024]) == "1, 2 and 1,024"


def test_intervals_name_their_kind():
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
        changed(
            planted_record("nt3", 1, loader=loader, load_s=load_s, size=size, rng_seed=seed),
            {"data.files.train.file_bytes": file_bytes, "data.files.test.file_bytes": 10_000},
        )
        for size, factor, file_bytes in (("small", 0.01, 40_000), ("full", 1.0, 4_000_000))
        for loader, load_s in (("original", 10 * factor), ("dask", 20 * factor))
        for seed in range(4)
    ]
    large, small = statements_on(*records)[LOADING].sentences
    for sentence in (large, small):
        check_holds(sentence, "slower by a factor of 2.00 (95 % interval 2.00 to 2.00")
    assert "4.00 MB" in large
    assert "0.0400 MB" in small


def test_unmeasured_communication_is_not_blamed():
    records = [
        changed(record, {"phases.train.communication": REMOVED}) if record.num_ranks > 1 else record
        for record in study()
    ]
    statement = statements_on(*records)["What to change"]
    assert any("--communication_log" in each for each in statement.sentences)


def test_energies_of_different_parts_are_not_compared():
    records = study(energy_j=100.0)
    records[:3] = [changed(record, {"energy.covers": ["cpu", "gpu"]}) for record in records[:3]]
    statement = statements_on(*records)[ENERGY_GAIN]
    assert statement.sentences == ()
    assert "cpu and gpu; gpu" in statement.lacking


def test_times_of_zero_have_no_ratio():
    loads = (("original", 0.0), ("parallel", 1.0))
    records = study(loads=loads)
    records += [changed(r, {"total_s": 0.0}) for r in study(loads=loads, batch_size=40)]
    statements = statements_on(*records)
    assert statements[LOADING].sentences == ()
    gain = statements[TIME_GAIN]
    assert not any("batch_size 40" in text for text in (*gain.sentences, *gain.unsure))
