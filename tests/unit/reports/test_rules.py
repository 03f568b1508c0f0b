"""The findings of a report: made from planted numbers, and refused where these are missing."""

from __future__ import annotations

import re

import pytest

from candle_p1.reports.experiments import group
from candle_p1.reports.frame import Run
from candle_p1.reports.rules import RULES, find
from candle_p1.reports.sections import TOPICS
from tests.planted_records import REMOVED, changed, planted_record

METHOD_TIME, METHOD_ENERGY = (
    "Total time with the paper's loading",
    "Energy with the paper's loading",
)
TIME_GAIN, ENERGY_GAIN = (
    f"{what} with other loaders and kernels" for what in ("Total time", "Energy")
)
METHOD_LOADING, LOADING = "The paper's loading", "Other loaders"
DOMINATES, ADVICE, EPOCHS = "What dominates", "What to change", "Epochs per rank"
TWO_LOADERS = (("original", 20.0), ("parallel", 1.0))
THREE_LOADERS = (("original", 20.0), ("chunked", 10.0), ("parallel", 1.0))


def experiment_of(records):
    (experiment,) = group([Run(i, record) for i, record in enumerate(records)])
    return experiment


def findings_on(*records):
    return {finding.rule.title: finding for finding in find(experiment_of(records))}


def check_holds(sentence, *parts):
    """Asserts that a sentence has these parts, in this order."""
    assert re.search(".*".join(map(re.escape, parts)), sentence), (parts, sentence)


def study(benchmark="nt3", loads=TWO_LOADERS, **kwargs):
    """Returns records of loaders on 1, 2 and 4 ranks, three times each."""
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


def on_many_cores(*records):
    return [changed(record, {"environment.node_cores": 64}) for record in records]


def test_a_single_run_supports_few_findings():
    findings = findings_on(planted_record("nt3", 1, epochs=8))
    made = {what for what, each in findings.items() if each.sentences}
    assert made == {DOMINATES, ADVICE}
    assert len(findings) == len(RULES)
    assert all(each.missing for what, each in findings.items() if what not in made)


def test_what_dominates_is_stated_by_scale():
    original, parallel = findings_on(*study())[DOMINATES].sentences
    check_holds(original, "original", "training on 1 rank (59 %", "3 runs")
    check_holds(original, "data loading on 2 and 4 ranks (51 to 63 %", "6 runs")
    check_holds(parallel, "parallel", "training on 1, 2 and 4 ranks (68 to 89 %", "9 runs")
    sentences = findings_on(*study(batch_size=20), *study(batch_size=40))[DOMINATES].sentences
    assert len(sentences) == 2  # series that agree share one
    check_holds(sentences[0], "loader original, batch_size 20; loader original, batch_size 40:")
    mixed = [planted_record("nt3", 1, load_s=load_s, epochs=8) for load_s in (50.0, 0.1)]
    finding = findings_on(*mixed)[DOMINATES]
    assert (finding.sentences, "differs" in finding.missing) == ((), True)


def test_many_series_are_counted_and_their_table_has_the_rest():
    records = [
        planted_record("nt3", num, batch_size=size, epochs=8, rng_seed=seed, epoch_s=1.0)
        for size in (10, 20, 40, 60, 80, 100, 120)
        for num in (1, 2)
        for seed in range(4)
    ]
    findings = findings_on(*records)
    assert findings[DOMINATES].sentences[0].startswith("7 series: ")
    *sentences, rest = findings["Speed-up"].sentences
    assert len(sentences) == 6
    assert "1 more" in rest


def test_published_gains_stand_beside_the_method_of_the_paper_alone():
    records = study(loads=THREE_LOADERS, energy_j=100.0)
    findings = findings_on(*records, *records)
    for what, gain in ((METHOD_TIME, "67.68 %"), (METHOD_LOADING, "at least 5")):
        (sentence, *_) = findings[what].sentences
        assert "chunked" in sentence
        assert "original" in sentence
        assert "parallel" not in " ".join(findings[what].sentences)
        assert any(gain in text for text in findings[what].published)
    against_original, against_chunked = findings[TIME_GAIN].sentences
    check_holds(against_original, "parallel compared with loader original: improved by 48.1")
    check_holds(against_chunked, "parallel compared with loader chunked: improved by 30.5")
    assert len(findings[LOADING].sentences) == 4
    for what, finding in findings.items():
        if what not in (METHOD_TIME, METHOD_LOADING, METHOD_ENERGY):
            assert not re.search("improved|factor", " ".join(finding.published)), what
    for what in (TIME_GAIN, ENERGY_GAIN, LOADING):
        assert findings[what].published == ()
    assert "original" in findings[METHOD_ENERGY].inconclusive[0]


def test_without_the_method_of_the_paper_no_gain_is_published():
    findings = findings_on(*study(energy_j=100.0))
    for what in (METHOD_TIME, METHOD_ENERGY, METHOD_LOADING):
        assert (findings[what].sentences, findings[what].published) == ((), ())
        assert "chunked" in findings[what].missing
    experiment = experiment_of(study())
    tables = {topic.slug: topic.make_table(experiment, "t") for topic in TOPICS}
    assert tables["improvement"] is None
    assert not any("published" in note for note in tables["other-improvement"].notes)
    assert all("loader chunked" not in note for note in tables["times"].notes)


@pytest.mark.parametrize(
    ("original_s", "parallel_s", "parts"),
    [
        # within the noise
        ((2.0, 3.0, 2.5, 2.6, 2.2, 2.4), (2.1, 2.9, 2.5, 2.6, 2.3, 2.4), None),
        ((2.0, 2.0, 2.0), (1.0, 1.0, 1.0), None),  # too few
        ((2.0,), (1.0,), None),
        ((1.0,) * 6, (5.0,) * 6, ["worsened by 32", "6 pairs", "worsened by 32", "6 against 6"]),
    ],
)
def test_only_significant_improvements_are_claimed(original_s, parallel_s, parts):
    records = [
        planted_record("nt3", 1, loader=loader, load_s=load_s, epochs=8, rng_seed=seed)
        for loader, loads_s in (("original", original_s), ("parallel", parallel_s))
        for seed, load_s in enumerate(loads_s)
    ]
    findings = findings_on(*records)
    gain, loading = findings[TIME_GAIN], findings[LOADING]
    if parts:
        check_holds(*gain.sentences, *parts)
        check_holds(*loading.sentences, "slower by a factor of 5.00")
    else:
        assert gain.sentences == loading.sentences == ()
        check_holds(*gain.inconclusive, "loader parallel", "by ", " %")
        check_holds(*loading.inconclusive, "train file", "factor")
        assert "improved" not in " ".join(findings[ADVICE].sentences)


def test_energy_is_compared_like_time_and_only_of_the_same_parts():
    records = [
        changed(record, {"energy.total_j": 200.0})
        if record.parameters["loader"].value == "original"
        else record
        for record in study(energy_j=100.0)
    ]
    (sentence,) = findings_on(*records)[ENERGY_GAIN].sentences
    check_holds(sentence, "improved by 50.0 % (95 % interval")
    simulated = [changed(record, {"energy.kind": "simulated"}) for record in records]
    (sentence,) = findings_on(*simulated)[ENERGY_GAIN].sentences
    assert sentence.startswith("Energy (simulated) of loader parallel")
    records[:3] = [changed(record, {"energy.covers": ["cpu", "gpu"]}) for record in records[:3]]
    finding = findings_on(*records)[ENERGY_GAIN]
    assert finding.sentences == ()
    assert "cpu and gpu; gpu" in finding.missing


def test_a_speedup_names_its_base_in_seconds():
    sentences = findings_on(*study(), *study())["Speed-up"].sentences
    parts = "original: on 4 ranks", "1.762 (95 % interval 1.762 to 1.762, 6 against 6 runs)"
    check_holds(sentences[0], *parts, "efficiency of 0.440", "55.5 s on 1 rank.")
    few = findings_on(*(record for record in study() if record.num_ranks > 1))["Speed-up"]
    assert few.sentences == ()
    check_holds(few.inconclusive[0], "39.5 s on 2 ranks", "no run")


@pytest.mark.parametrize(
    ("compiled_on", "is_told"), [({1}, True), ({1, 2, 4}, False), (set(), False)]
)
def test_a_speedup_says_which_runs_xla_compiled(compiled_on, is_told):
    """On GPUs, XLA compiles the step of one rank, but not of several, which use Horovod."""
    records = [
        planted_record("nt3", num, epoch_s=s, jit_compile=num in compiled_on)
        for num, s in ((1, 2.0), (2, 2.5), (4, 3.0)) * 4
    ]
    findings = findings_on(*records)
    for what in ("Speed-up", "Time per epoch"):
        (sentence,) = findings[what].sentences
        assert ("(jit_compile) of the runs on 1 rank" in sentence) == is_told
    check_holds(sentence, "on 4 ranks", "1.500 times", "2.00 s on 1 rank")


ENOUGH = {"seeds": range(4), "counts": (1,)}


@pytest.mark.parametrize(
    ("study", "kwargs", "parts"),
    [
        (
            ("nt3", "accuracy", {2: 0.6, 4: 0.8, 8: 1.0, 16: 1.0}),
            {},
            ("falls below 8 epochs", ", as published", "at 4 by 0.200 (95 %", "6 against 12 runs"),
        ),
        (
            ("nt3", "accuracy", {2: 0.6, 4: 1.0, 8: 1.0}),
            {},
            ("not immediately", "contrary to the paper: at 2 by 0.400 (", "at 4,", "0 ("),
        ),
        (
            ("p1b2", "accuracy", {4: 0.34, 16: 0.35}),
            {},
            ("does not fall by 0.05", "16 epochs", "contrary", "at 4,", "-0.0100 (95 %"),
        ),
        (
            ("p1b1", "loss", {1: 0.05, 4: 0.0402, 8: 0.04}),
            ENOUGH,
            ("rises", "not immediately", "8 epochs per rank: at 1 by 0.0100 (", "at 4,", "0.00020"),
        ),
        (
            ("p1b1", "loss", {1: 0.0402, 4: 0.0402, 8: 0.04}),
            ENOUGH,
            ("does not rise by 5 %", "8 epochs"),
        ),
    ],
)
def test_epochs_per_rank_are_compared_with_the_published_number_or_the_most(study, kwargs, parts):
    finding = findings_on(*weak_study(*study, **kwargs))[EPOCHS]
    (sentence,) = finding.sentences
    check_holds(sentence, *parts)
    assert ("the paper" in sentence or "published" in sentence) == (study[0] != "p1b1")
    assert finding.published


def test_a_drop_beside_an_inconclusive_difference():
    records = weak_study("nt3", "accuracy", {2: 0.6, 8: 1.0})
    records += weak_study("nt3", "accuracy", {4: 0.7})[:1]
    (sentence,) = findings_on(*records)[EPOCHS].sentences
    check_holds(sentence, "falls below 8 epochs", "at 2 by", "inconclusive.")


def test_scattered_accuracies_decide_nothing():
    records = [
        planted_record("nt3", 1, epochs=epochs, quality={"accuracy": accuracy}, rng_seed=seed)
        for epochs in (4, 8)
        for seed, accuracy in enumerate((0.4, 0.5, 0.6, 0.8, 0.9, 1.0))
    ]
    finding = findings_on(*records)[EPOCHS]
    assert finding.sentences == ()
    check_holds(finding.inconclusive[0], "below 8 epochs", "0 (95 % interval -0.400")


def test_diverged_models_limited_steps_and_few_epochs_or_runs_are_refused():
    diverged = weak_study("nt3", "accuracy", {4: 1.0, 8: 1.0})
    diverged[0] = changed(diverged[0], {"quality.accuracy.value": None})
    limited = {"train_steps": 1, "quality": {"accuracy": 1.0}}
    for records, reason in (
        (diverged, "1 run diverged"),
        (weak_study("nt3", "accuracy", {1: 0.6, 4: 0.7}), "1 and 4"),
        (weak_study("nt3", "accuracy", {4: 0.6, 8: 0.7})[:2], "too few runs"),
        ([planted_record("nt3", 1, epochs=8, **limited)], "limited"),
    ):
        finding = findings_on(*records)[EPOCHS]
        assert finding.sentences == ()
        assert reason in finding.missing


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
    finding = findings_on(*records)["Scaling of the batch size"]
    best, fastest = finding.sentences
    check_holds(
        best, "4 ranks", "cbrt", "accuracy, 0.663", "sqrt with 0.633, a difference of 0.0300"
    )
    check_holds(best, "(95 % interval 0.0240 to 0.0360, 4 against 4 runs)")
    check_holds(fastest, "batch_scaling linear has the shortest total time, 10.50 s")
    assert any("0.6579 on 48 GPUs with cbrt" in text for text in finding.published)


@pytest.mark.parametrize(
    ("limits", "best"),
    [({}, ["linear has the best test accuracy, 0.900"]), ({"train_steps": 2}, [])],
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
    finding = findings_on(*records)["Other settings"]
    assert len(finding.sentences) == len(best)
    for sentence in finding.sentences:
        check_holds(sentence, "2 ranks", *best)
    check_holds(finding.inconclusive[-1], "the shortest total time")


def test_advice_names_the_measured_gain():
    original, parallel = findings_on(*on_many_cores(*study()))[ADVICE].sentences
    check_holds(original, "loader original, on 4 ranks", "--loader parallel", "48.1 % (95 %")
    check_holds(parallel, "loader parallel, on 4 ranks", "8 epochs")
    alone = [record for record in study() if record.data.loader == "original"]
    (sentence,) = findings_on(*alone)[ADVICE].sentences
    assert "not measured" in sentence


@pytest.mark.parametrize(
    ("kwargs", "advice"),
    [
        ({"startup_s": 100.0}, "nothing in the benchmark"),
        ({"communication_s": 31.0, "num_ranks": 2, "epochs": 64}, "--backward_passes_per_step"),
        ({"epoch_s": 99.0}, "was not measured here"),
        ({"epoch_s": 99.0, "epochs_scaling": "weak"}, "do not shorten an epoch"),
        ({"wait_s": 100.0, "loader": "cached"}, "--stage_dir"),
        ({"load_s": 100.0, "loader": "parallel"}, "--loader cached"),
    ],
)
def test_advice_follows_from_what_dominates(kwargs, advice):
    record = planted_record("nt3", **{"epochs": 32, "num_ranks": 1, "load_s": 0.1} | kwargs)
    (sentence,) = findings_on(*on_many_cores(record))[ADVICE].sentences
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
    (sentence,) = findings_on(*on_many_cores(*records))[ADVICE].sentences
    assert advice in sentence
    assert ("use more ranks" in sentence) == (advice.startswith(("the 8", "as long")))


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
    large, small = findings_on(*records)[LOADING].sentences
    for sentence, size in ((large, "4.00 MB"), (small, "0.0400 MB")):
        check_holds(sentence, size, "slower by a factor of 2.00 (95 % interval 2.00 to 2.00")


def test_unmeasured_communication_is_not_blamed():
    records = [
        changed(record, {"phases.train.communication": REMOVED}) if record.num_ranks > 1 else record
        for record in study()
    ]
    assert any("--communication_log" in each for each in findings_on(*records)[ADVICE].sentences)


def test_times_of_zero_have_no_ratio():
    loads = (("original", 0.0), ("parallel", 1.0))
    records = study(loads=loads)
    records += [changed(r, {"total_s": 0.0}) for r in study(loads=loads, batch_size=40)]
    findings = findings_on(*records)
    assert findings[LOADING].sentences == ()
    gain = findings[TIME_GAIN]
    assert not any("batch_size 40" in text for text in (*gain.sentences, *gain.inconclusive))
