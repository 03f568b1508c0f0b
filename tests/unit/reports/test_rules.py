"""The findings of a report: made from planted numbers, and refused where these are missing."""

from __future__ import annotations

import re

import pytest

from candle_p1.reports.rules import RULES, find
from candle_p1.reports.sections import TOPICS
from tests.planted_records import REMOVED, changed, experiment_of, planted_record

METHOD_TIME, METHOD_ENERGY, TIME_GAIN, ENERGY_GAIN = (
    f"{what} with {how}"
    for how in ("the paper's loading", "other loaders and kernels")
    for what in ("Total time", "Energy")
)
METHOD_LOADING, LOADING = "The paper's loading", "Other loaders"
DOMINATES, ADVICE, EPOCHS = "What dominates", "What to change", "Epochs per rank"
ORIGINAL, CHUNKED, PARALLEL = (
    {"loader": name, "load_s": load_s}
    for name, load_s in (("original", 20.0), ("chunked", 10.0), ("parallel", 1.0))
)


def records_of(*variants, counts=(1,), seeds=range(3), benchmark="nt3", **facts):
    """Returns records of every variant, on every number of ranks, with every seed."""
    return [
        planted_record(benchmark, num, **{"rng_seed": seed} | facts | variant)
        for num in counts
        for variant in variants
        for seed in seeds
    ]


def study(*variants, **facts):
    """Returns records on 1, 2 and 4 ranks, three times each."""
    return records_of(
        *variants or (ORIGINAL, PARALLEL), **{"counts": (1, 2, 4), "epochs": 32} | facts
    )


def qualities(benchmark, name, by_epochs, counts=(1, 2), seeds=range(3), **facts):
    """Returns records of the qualities of some numbers of epochs per rank."""
    variants = ({"epochs": epochs, "quality": {name: v}} for epochs, v in by_epochs.items())
    facts = {"epochs_scaling": "weak", "counts": counts, "seeds": seeds} | facts
    return records_of(*variants, benchmark=benchmark, **facts)


def findings_on(*records):
    return {finding.rule.title: finding for finding in find(experiment_of(*records))}


def check_holds(sentence, *parts):
    """Asserts that a sentence has these parts, in this order."""
    assert re.search(".*".join(map(re.escape, parts)), sentence), (parts, sentence)


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
    finding = findings_on(*records_of({"load_s": 50.0}, {"load_s": 0.1}, epochs=8))[DOMINATES]
    assert (finding.sentences, "differs" in finding.missing) == ((), True)


def test_many_series_are_counted_and_their_table_has_the_rest():
    sizes = ({"batch_size": size} for size in (10, 20, 40, 60, 80, 100, 120))
    findings = findings_on(*records_of(*sizes, counts=(1, 2), seeds=range(4), epochs=8))
    assert findings[DOMINATES].sentences[0].startswith("7 series: ")
    *sentences, rest = findings["Speed-up"].sentences
    assert len(sentences) == 6
    assert "1 more" in rest


def test_published_gains_stand_beside_the_method_of_the_paper_alone():
    records = study(ORIGINAL, CHUNKED, PARALLEL, energy_j=100.0)
    findings = findings_on(*records, *records)
    for what, gain in ((METHOD_TIME, "67.68 %"), (METHOD_LOADING, "at least 5")):
        sentences = " ".join(findings[what].sentences)
        assert "chunked" in sentences
        assert "original" in sentences
        assert "parallel" not in sentences
        assert any(gain in text for text in findings[what].published)
    against_original, against_chunked = findings[TIME_GAIN].sentences
    check_holds(against_original, "parallel compared with loader original: improved by 48.1")
    check_holds(against_chunked, "parallel compared with loader chunked: improved by 30.5")
    assert len(findings[LOADING].sentences) == 4
    for what, finding in findings.items():
        if what not in (METHOD_TIME, METHOD_LOADING, METHOD_ENERGY):
            assert not re.search("improved|factor", " ".join(finding.published)), what
    assert {findings[what].published for what in (TIME_GAIN, ENERGY_GAIN, LOADING)} == {()}
    assert "original" in findings[METHOD_ENERGY].inconclusive[0]


def test_without_the_method_of_the_paper_no_gain_is_published():
    records = study(energy_j=100.0)
    findings = findings_on(*records)
    for what in (METHOD_TIME, METHOD_ENERGY, METHOD_LOADING):
        assert (findings[what].sentences, findings[what].published) == ((), ())
        assert "chunked" in findings[what].missing
    experiment = experiment_of(*records)
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
    records = study(ORIGINAL | {"energy_j": 200.0}, PARALLEL | {"energy_j": 100.0})
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
    sentences = findings_on(*study(seeds=(0, 1, 2) * 2))["Speed-up"].sentences
    parts = "original: on 4 ranks", "1.762 (95 % interval 1.762 to 1.762, 6 against 6 runs)"
    check_holds(sentences[0], *parts, "efficiency of 0.440", "55.5 s on 1 rank.")
    few = findings_on(*study(counts=(2, 4)))["Speed-up"]
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


FOUR = {"seeds": range(4), "counts": (1,)}


@pytest.mark.parametrize(
    ("records", "parts"),
    [
        (
            qualities("nt3", "accuracy", {2: 0.6, 4: 0.8, 8: 1.0, 16: 1.0}),
            ("falls below 8 epochs", ", as published", "at 4 by 0.200 (95 %", "6 against 12 runs"),
        ),
        (
            qualities("nt3", "accuracy", {2: 0.6, 4: 1.0, 8: 1.0}),
            ("not immediately", "contrary to the paper: at 2 by 0.400 (", "at 4,", "0 ("),
        ),
        (
            qualities("p1b2", "accuracy", {4: 0.34, 16: 0.35}),
            ("does not fall by 0.05", "16 epochs", "contrary", "at 4,", "-0.0100 (95 %"),
        ),
        (
            qualities("p1b1", "loss", {1: 0.05, 4: 0.0402, 8: 0.04}, **FOUR),
            ("rises", "not immediately", "8 epochs per rank: at 1 by 0.0100 (", "at 4,", "0.00020"),
        ),
        (
            qualities("p1b1", "loss", {1: 0.0402, 4: 0.0402, 8: 0.04}, **FOUR),
            ("does not rise by 5 %", "8 epochs"),
        ),
        (
            qualities("nt3", "accuracy", {2: 0.6, 8: 1.0})
            + qualities("nt3", "accuracy", {4: 0.7}, (1,), (0,)),
            ("falls below 8 epochs", "as published: at 2 by", "inconclusive."),
        ),
    ],
)
def test_epochs_per_rank_are_compared_with_the_published_number_or_the_most(records, parts):
    finding = findings_on(*records)[EPOCHS]
    (sentence,) = finding.sentences
    check_holds(sentence, *parts)
    assert bool(re.search("the paper|published", sentence)) == (records[0].benchmark != "p1b1")
    assert finding.published


def test_what_decides_nothing_about_epochs_is_not_claimed():
    scattered = [
        planted_record("nt3", 1, epochs=epochs, quality={"accuracy": accuracy}, rng_seed=seed)
        for epochs in (4, 8)
        for seed, accuracy in enumerate((0.4, 0.5, 0.6, 0.8, 0.9, 1.0))
    ]
    diverged = qualities("nt3", "accuracy", {4: 1.0, 8: 1.0})
    diverged[0] = changed(diverged[0], {"quality.accuracy.value": None})
    for records, reason in (
        (scattered, "0 (95 % interval -0.400"),
        (diverged, "1 run diverged"),
        (qualities("nt3", "accuracy", {1: 0.6, 4: 0.7}), "1 and 4"),
        (qualities("nt3", "accuracy", {4: 0.6, 8: 0.7}, (1,), (0,)), "too few runs"),
        (qualities("nt3", "accuracy", {4: 0.6, 8: 0.7}, train_steps=1), "limited"),
    ):
        finding = findings_on(*records)[EPOCHS]
        assert finding.sentences == ()
        assert reason in " ".join([*finding.inconclusive, finding.missing])


def test_the_best_and_the_fastest_batch_scaling_are_named():
    records = [
        record
        for seed in range(4)
        for record in records_of(
            *(
                {"batch_scaling": scaling, "epoch_s": s, "quality": {"accuracy": q + 0.002 * seed}}
                for scaling, s, q in (("linear", 5, 0.6), ("sqrt", 10, 0.63), ("cbrt", 15, 0.66))
            ),
            **{"benchmark": "p1b3", "counts": (4,), "seeds": (seed,), "epochs": 1},
        )
    ]
    finding = findings_on(*records)["Scaling of the batch size"]
    best, fastest = finding.sentences
    check_holds(best, "4 ranks", "cbrt", "0.663", "sqrt with 0.633, a difference of 0.0300")
    check_holds(best, "(95 % interval 0.0240 to 0.0360, 4 against 4 runs)")
    check_holds(fastest, "batch_scaling linear has the shortest total time, 10.50 s")
    assert any("0.6579 on 48 GPUs with cbrt" in text for text in finding.published)


@pytest.mark.parametrize("limits", [{}, {"train_steps": 2}])
def test_other_settings_are_compared_on_the_most_ranks(limits):
    variants = (
        {"lr_scaling": scaling, "quality": {"accuracy": accuracy}}
        for scaling, accuracy in (("none", 0.8), ("linear", 0.9), ("sqrt", 0.85))
    )
    facts = {"counts": (1, 2), "seeds": range(4), "epochs": 8} | limits
    finding = findings_on(*records_of(*variants, **facts))["Other settings"]
    assert len(finding.sentences) == (not limits)
    for sentence in finding.sentences:
        check_holds(sentence, "2 ranks", "linear has the best test accuracy, 0.900")
    check_holds(finding.inconclusive[-1], "the shortest total time")


def test_advice_names_the_measured_gain():
    original, parallel = findings_on(*on_many_cores(*study()))[ADVICE].sentences
    check_holds(original, "loader original, on 4 ranks", "--loader parallel", "48.1 % (95 %")
    check_holds(parallel, "loader parallel, on 4 ranks", "8 epochs")
    (sentence,) = findings_on(*study(ORIGINAL))[ADVICE].sentences
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
        changed(record, {"data.files.train.file_bytes": size, "data.files.test.file_bytes": 10_000})
        for name, factor, size in (("small", 0.01, 40_000), ("full", 1.0, 4_000_000))
        for record in records_of(
            {"loader": "original", "load_s": 10 * factor},
            {"loader": "dask", "load_s": 20 * factor},
            **{"size": name, "seeds": range(4)},
        )
    ]
    large, small = findings_on(*records)[LOADING].sentences
    for sentence, size in ((large, "4.00 MB"), (small, "0.0400 MB")):
        check_holds(sentence, size, "slower by a factor of 2.00 (95 % interval 2.00 to 2.00")


def test_unmeasured_communication_is_not_blamed():
    records = study(counts=(2, 4))
    records = [changed(record, {"phases.train.communication": REMOVED}) for record in records]
    assert any("--communication_log" in each for each in findings_on(*records)[ADVICE].sentences)


def test_times_of_zero_have_no_ratio():
    variants = ORIGINAL | {"load_s": 0.0}, PARALLEL
    records = study(*variants)
    records += [changed(each, {"total_s": 0.0}) for each in study(*variants, batch_size=40)]
    findings = findings_on(*records)
    assert findings[LOADING].sentences == ()
    gain = findings[TIME_GAIN]
    assert not any("batch_size 40" in text for text in (*gain.sentences, *gain.inconclusive))
