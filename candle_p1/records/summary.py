"""A run's record as text and tables: its results, a summary, or all of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace

from rich.table import Table

from candle_p1.records.rank_stats import Bytes
from candle_p1.records.segments import is_continued
from candle_p1.records.tables import Column, empty_table, number_or_words, quantity, table_of
from candle_p1.records.types import (
    Absent,
    Communication,
    EpochRecord,
    JobEnergy,
    ParameterValue,
    PhaseTimes,
    Position,
    QualityFigure,
    Rank,
    RunRecord,
    RunTotals,
    SavedCheckpoints,
    Segment,
    TimeKind,
)
from candle_p1.text import count, name_nodes

MIB = 2**20
VALIDATES_ON_TEST = "the validation samples are the test samples"


def summary(record: RunRecord) -> Iterator[str]:
    """Yields in a few lines what ran where, of a run in any state, and its results."""
    ranks = count(record.num_ranks, "rank")
    hosts = [rank.host for rank in record.ranks or ()]
    nodes = f" on {name_nodes(hosts)}" if hosts else ""
    started = record.started[:19].replace("T", " ")
    yield f"{record.benchmark}: {record.status}, {ranks}{nodes}, {started} UTC"
    if record.failure:
        where = f" in {record.failure.phase}" if record.failure.phase else ""
        who = f" on rank {record.failure.rank}" if record.failure.rank is not None else ""
        yield f"failure{who}{where}: {record.failure.reason}"
    if record.known_until_s is not None:
        yield f"it ended early; rank 0 had measured, after {record.known_until_s:.1f} s:"
        for epoch in record.training.epochs[-1:] if record.training else ():
            metrics = (f"{name} {number_or_words(each)}" for name, each in epoch.metrics.items())
            yield f"epoch {epoch.epoch}: {', '.join(metrics)}"
    if record.plan:
        plan = record.plan
        yield (
            f"{count(plan.epochs_per_rank, 'epoch')} on each rank,"
            f" {count(plan.steps_per_epoch, 'step')} each, batch {plan.batch_size},"
            f" learning rate {plan.learning_rate:g}"
        )
    if chosen := _set_by_user(record):
        yield f"set: {', '.join(f'{name} {each.value}' for name, each in chosen)}"
    if record.data and record.data.validates_on_test:
        yield VALIDATES_ON_TEST
    yield from results(record)
    if record.energy and record.energy.kind == "absent":
        yield "energy: not measured"
    if record.data and record.data.synthetic:
        yield "the data are synthetic: accuracy and loss say nothing about cancer"
    yield from (f"warning: {text}" for text in record.warnings or ())


def results(record: RunRecord) -> Iterator[str]:
    """Yields how good the model is, how long the run took, and what took the time."""
    if record.training and record.training.stopped and record.plan:
        epochs = f"{len(record.training.epochs)} of {record.plan.epochs_per_rank} epochs"
        yield f"trained {epochs}: {record.training.stopped}"
    if record.training and (best := record.training.model_epoch):
        yield f"the model is that of epoch {best}, which has the lowest validation loss"
    if record.quality:
        yield f"test {', '.join(_quality(record.quality))}"
    if record.phases and record.total_s:
        shares = {name: phase.mean_s / record.total_s for name, phase in record.phases.items()}
        longest = sorted(shares, key=lambda name: -shares[name])[:3]
        parts = ", ".join(f"{shares[name]:.0%} {name}" for name in longest)
        num_per_s = record.training and record.training.samples_per_s
        speed = f"; training at {num_per_s:,.1f} samples/s" if num_per_s else ""
        yield f"{record.total_s:.1f} s in all: {parts}{speed}"
    yield from _efficiency(record)
    if (energy := record.energy) and energy.kind != "absent":
        rate = f", read at {energy.power_hz:g} Hz" if energy.power_hz else ""
        yield (
            f"energy ({energy.kind}): {energy.total_j:,.1f} J, {energy.mean_w:,.1f} W on average,"
            f" of {', '.join(energy.covers)} in all{rate}"
        )
    yield from _totals(record.totals)
    yield from _not_comparable(record)


def details(record: RunRecord) -> Iterator[str | Table]:
    """Yields everything that a record says, of a run in any state: first its summary."""
    yield from summary(record)
    yield from _ranks_and_files(record)
    if record.segments:
        yield _segment_table(record.segments)
    if record.phases:
        yield _phase_table(record, record.phases)
        yield _usage_table(record.phases)
    if record.training and record.training.epochs:
        yield from _epoch_tables(record.training.epochs)
    if record.communication:
        yield from _communication_tables(record.communication)
    if record.energy:
        yield from _energy_tables(record.energy)
    yield from _checkpoints(record.checkpoints)
    yield _parameter_table(record)


def _ranks_and_files(record: RunRecord) -> Iterator[str | Table]:
    if record.ranks:
        yield _rank_table(record.ranks)
    if record.peak_rss:
        low, high = (size / MIB for size in (record.peak_rss.min_bytes, record.peak_rss.max_bytes))
        yield f"peak memory of a rank: {low:,.0f} to {high:,.0f} MiB"
    for role, file in record.data.files.items() if record.data else ():
        line = f"{role}: {file.path}, {file.file_bytes / MIB:,.1f} MiB"
        if file.num_files is not None:
            line += f" in {count(file.num_files, 'file')}"
        if file.num_rows is not None and file.num_columns is not None:
            line += f", {file.num_rows:,} x {file.num_columns:,}"
        if record.data and file.load:
            line += f", loaded in {file.load.max_s:.2f} s by {record.data.loader}"
        yield line
        if file.reading and (union_s := file.reading.union_s):
            rate = file.reading.read.mean_bytes * record.num_ranks / MIB / union_s
            yield (
                f"{role}: the ranks read for {union_s:.2f} s, {file.reading.mean_ranks:.1f} of them"
                f" at a time, {rate:,.0f} MiB/s together"
            )


def _rank_table(ranks: Sequence[Rank]) -> Table:
    """Identical ranks of a node are in one row."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        key = (rank.host, str(rank.node), rank.device, str(rank.threads))
        alike.setdefault(key, []).append(rank.rank)
    table = empty_table("ranks", "ranks", "host", "node", "device", "threads", num_words=2)
    for facts, numbers in alike.items():
        first, last = numbers[0], numbers[-1]
        is_range = first < last == first + len(numbers) - 1
        table.add_row(f"{first} to {last}" if is_range else ", ".join(map(str, numbers)), *facts)
    return table


def _phase_table(record: RunRecord, phases: Mapping[str, PhaseTimes]) -> Table:
    energy, columns = record.energy, ["phase", "min", "mean", "max", "waiting"]
    energies = energy.phases if energy else {}
    has_energy = any(phase.energy_j is not None for phase in energies.values())
    if has_energy:
        columns += ["energy (J)", "power (W)"]
    ranks = count(record.num_ranks, "rank")
    table = empty_table(f"{record.benchmark} on {ranks}: seconds per phase", *columns)

    def add(phases: Mapping[str, PhaseTimes], indent: str = "") -> None:
        for name, phase in phases.items():
            cells = [f"{seconds:.2f}" for seconds in (phase.min_s, phase.mean_s, phase.max_s)]
            cells.append(f"{phase.communication.mean_s:.2f}" if phase.communication else "")
            if has_energy and not indent:
                used = energies.get(name)
                few = "~" if used and used.few_samples else ""
                cells.append(few + quantity(used.energy_j if used else None))
                cells.append(quantity(used.mean_w if used else None))
            table.add_row(indent + name, *cells)
            add(phase.regions or {}, f"{indent}  ")

    add(phases)
    table.add_section()
    total = "" if record.total_s is None else f"{record.total_s:.2f}"
    cells = [quantity(energy.total_j), quantity(energy.mean_w)] if has_energy and energy else []
    table.add_row("total", "", "", total, "", *cells)
    return table


def _segment_table(segments: Sequence[Segment]) -> Table:
    def place(position: Position | None) -> str:
        return f"{position.epoch}/{position.step}" if position else ""

    numbers = itertools.count(1)
    return table_of(
        "segments of the run: steps of each rank",
        segments,
        {
            "segment": lambda each: str(next(numbers)),
            "status": "status",
            "started (UTC)": lambda each: each.started[:19].replace("T", " "),
            "ranks": "num_ranks",
            "from epoch/step": lambda each: place(each.begin),
            "to": lambda each: place(each.end),
            "steps": "steps:,",
            "lost": "lost_steps:,",
            "time (s)": lambda each: _seconds(each.total_s, each.time_kind),
            "energy (J)": lambda each: quantity(each.energy.energy_j) if each.energy else "",
        },
        num_words=3,
    )


def _seconds(seconds: float | None, kind: TimeKind | None) -> str:
    if seconds is None:
        return ""
    return ("~" if kind == "estimated" else "") + f"{seconds:.2f}"


def _totals(totals: RunTotals | None) -> Iterator[str]:
    if totals is None or totals.num_segments == 1:
        return
    lost, used = "an unknown number of steps", "energy not measured"
    if totals.lost_steps is not None:
        lost = count(totals.lost_steps, "step")
    if totals.energy.energy_j is not None:
        used = f"{totals.energy.energy_j:,.1f} J ({totals.energy.kind})"
    yield (
        f"continued, {count(totals.num_segments, 'segment')}:"
        f" {_seconds(totals.total_s, totals.time_kind)} s in all, {lost} of each rank repeated;"
        f" {used}"
    )


def _checkpoints(saved: SavedCheckpoints | None) -> Iterator[str]:
    if saved is None:
        return
    line = f"{count(saved.num_saved, 'checkpoint')}, {saved.saved_bytes / MIB:,.1f} MiB"
    if saved.wait:
        line += f", for which training waited {saved.wait.max_s:.2f} s"
    if saved.num_not_taken:
        line += f"; {saved.num_not_taken} not taken, because the one before was being written"
    yield f"{line}: {saved.directory}"
    yield from (f"checkpoint not saved: {error}" for error in saved.errors)


def _usage_table(phases: Mapping[str, PhaseTimes]) -> Table:
    def mebibytes(size: Bytes | None) -> str:
        return f"{size.mean_bytes / MIB:,.1f}" if size else "unknown"

    def page_faults(row: SimpleNamespace) -> str:
        return f"{row.used.minor_faults.mean_num + row.used.major_faults.mean_num:,.0f}"

    return table_of(
        "use of the machine, mean over ranks",
        [SimpleNamespace(name=k, used=each.usage) for k, each in phases.items() if each.usage],
        {
            "phase": "name",
            "CPU (s)": "used.cpu.mean_s:.2f",
            "waits": "used.voluntary_switches.mean_num:,.0f",
            "preempted": "used.involuntary_switches.mean_num:,.0f",
            "page faults": page_faults,
            "read (MiB)": lambda row: mebibytes(row.used.read),
            "peak memory (MiB)": lambda row: mebibytes(row.used.peak_rss),
            "memory at its end (MiB)": lambda row: mebibytes(row.used.pss),
        },
    )


def _epoch_tables(epochs: Sequence[EpochRecord]) -> Iterator[str | Table]:
    def milliseconds(epoch: EpochRecord, name: str) -> str:
        times = getattr(epoch.steps, name) if epoch.steps else None
        return f"{1e3 * times.max_s:.2f}" if times else ""

    yield table_of(
        "epochs: slowest rank",
        epochs,
        {
            "epoch": "epoch",
            "train (s)": "train.max_s:.3f",
            "step: median": lambda epoch: milliseconds(epoch, "median"),
            "99 % (ms)": lambda epoch: milliseconds(epoch, "p99"),
            "exposed (s)": "exposed_communication.mean_s:.3f",
            "hidden": "hidden_share:.0%",
            "balance": "efficiency.load_balance:.3f",
            "communication": "efficiency.communication_efficiency:.3f",
            "POP": "efficiency.parallel_efficiency:.3f",
        },
    )
    first = epochs[0].steps.first if epochs[0].steps else None
    if first:
        yield (
            f"The first step took {first.max_s:.2f} s, which includes compiling; the table leaves"
            " it out."
        )


def _efficiency(record: RunRecord) -> Iterator[str]:
    efficiency = record.efficiency
    if efficiency is None or record.num_ranks == 1:
        return
    if isinstance(efficiency, Absent):
        yield f"POP efficiency: not measured: {efficiency.reason}"
    else:
        yield (
            f"POP efficiency {efficiency.parallel_efficiency:.3f} = load balance"
            f" {efficiency.load_balance:.3f} x communication efficiency"
            f" {efficiency.communication_efficiency:.3f}"
        )


def _communication_tables(communication: Communication) -> Iterator[Table]:
    columns: dict[str, Column]
    totals: dict[str, Column] = {
        "MiB": lambda each: f"{each.num_bytes / MIB:,.2f}",
        "s per rank": "time.mean_s:.3f",
    }
    if communication.collectives:
        columns = {"library": "library", "operation": "name", "calls": "num_calls:,", **totals}
        yield table_of("communication: all ranks", communication.collectives, columns, num_words=2)
    if communication.message_sizes:
        columns = {
            "library": "library",
            "bytes": lambda each: f"{each.from_bytes:,} to {each.below_bytes - 1:,}",
            "messages": "num_calls:,",
            **totals,
            "MB/s of a rank": lambda each: f"{each.bytes_per_s / 1e6:,.1f}",
        }
        yield table_of("messages by size", communication.message_sizes, columns)


def _energy_tables(energy: JobEnergy) -> Iterator[str | Table]:
    if energy.kind == "absent":
        yield f"energy: not measured: {energy.reason}"
        return
    yield table_of(
        "energy by kind of device",
        energy.devices,
        {
            "device": "label",
            "source": "source",
            "devices": "num_devices",
            "counted": lambda group: "yes" if group.counted else "no",
            "J of one: mean": lambda group: quantity(group.energy and group.energy.mean_j),
            "J: max": lambda group: quantity(group.energy and group.energy.max_j),
            "W of one: mean": lambda group: quantity(group.power and group.power.mean_w),
            "W: max": lambda group: quantity(group.power and group.power.max_w),
        },
        num_words=2,
    )
    yield from (f"note: {note}" for note in energy.notes)


def _quality(quality: Mapping[str, QualityFigure]) -> Iterator[str]:
    for name, figure in quality.items():
        naive = ""
        if "naive" in figure.model_fields_set:
            naive = f" (naive predictor {number_or_words(figure.naive)})"
        yield f"{name} {number_or_words(figure.value)}{naive}"


def _set_by_user(record: RunRecord) -> list[tuple[str, ParameterValue]]:
    origins = ("flag", "config file", "program")
    return [
        each for each in sorted(record.parameters.items()) if each[1].origin.startswith(origins)
    ]


def _parameter_table(record: RunRecord) -> Table:
    return table_of(
        "parameters set by the user",
        _set_by_user(record),
        {
            "name": lambda row: row[0],
            "value": lambda row: str(row[1].value),
            "from": lambda row: row[1].origin,
        },
        num_words=3,
    )


def _not_comparable(record: RunRecord) -> Iterator[str]:
    training = record.training
    if is_continued(record):
        yield "the run began from a checkpoint: do not compare its times"
    if training and training.traced:
        yield "Horovod's timeline was written: do not compare the times of this run"
    if training and training.profiled:
        yield "the run was profiled: do not compare its times"
