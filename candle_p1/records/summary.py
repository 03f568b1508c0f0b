"""A run's record as text and tables: its results, a summary, or all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from candle_p1.records.parts import is_continued
from candle_p1.records.parts_summary import checkpoints, parts_table, whole
from candle_p1.records.tables import empty_table, number_or_words, quantity, table_of
from candle_p1.records.types import Absent, StepTimes
from candle_p1.text import count, name_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from candle_p1.records.spread import Bytes, Seconds
    from candle_p1.records.types import (
        CommunicationFacts,
        Efficiency,
        EnergyFacts,
        EnergyTotal,
        EpochFacts,
        ParameterValue,
        PhaseTimes,
        QualityFigure,
        RankFacts,
        ReadingFacts,
        RunRecord,
    )

MIB = 2**20


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
    if record.quality:
        yield f"test {', '.join(_quality(record.quality))}"
    if record.phases and record.total_s:
        shares = {name: phase.mean_s / record.total_s for name, phase in record.phases.items()}
        longest = sorted(shares, key=lambda name: -shares[name])[:3]
        parts = ", ".join(f"{shares[name]:.0%} {name}" for name in longest)
        rate = record.training and record.training.samples_per_s
        speed = f"; training at {rate:,.1f} samples/s" if rate else ""
        yield f"{record.total_s:.1f} s in all: {parts}{speed}"
    yield from _efficiency(record)
    if record.energy and record.energy.kind != "absent":
        yield _energy_line(record.energy)
    yield from whole(record)
    yield from _not_comparable(record)


def details(record: RunRecord) -> Iterator[str | Table]:
    """Yields everything that a record says, of a run in any state: first its summary."""
    yield from summary(record)
    yield from _ranks_and_files(record)
    if record.parts:
        yield parts_table(record.parts)
    if record.phases:
        yield _phase_table(record, record.phases)
        yield _usage_table(record.phases)
    if record.training and record.training.epochs:
        yield from _epoch_tables(record.training.epochs)
    if record.communication:
        yield from _communication_tables(record.communication)
    if record.energy:
        yield from _energy_tables(record.energy)
    yield from checkpoints(record)
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
        if file.reading and file.reading.union_s:
            yield _reading_line(role, file.reading, record.num_ranks)


def _reading_line(role: str, reading: ReadingFacts, num_ranks: int) -> str:
    rate = reading.read.mean_bytes * num_ranks / MIB / reading.union_s
    return (
        f"{role}: the ranks read for {reading.union_s:.2f} s, {reading.mean_ranks:.1f} of them at a"
        f" time, {rate:,.0f} MiB/s together"
    )


def _rank_table(ranks: Sequence[RankFacts]) -> Table:
    """Returns a table of the ranks, with identical ranks of a node in one row."""
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
    """Returns a table of seconds per phase, with energy if it was measured."""
    energy = record.energy
    has_energy = energy is not None and any(
        phase.energy_j is not None for phase in energy.phases.values()
    )
    columns = ["phase", "min", "mean", "max", "waiting"]
    columns += ["energy (J)", "power (W)"] if has_energy else []
    ranks = count(record.num_ranks, "rank")
    table = empty_table(f"{record.benchmark} on {ranks}: seconds per phase", *columns)
    for name, phase in phases.items():
        of_phase = energy.phases.get(name) if energy else None
        _add_phase(table, name, phase, _energy_cells(of_phase) if has_energy else [], indent=0)
    table.add_section()
    total = "" if record.total_s is None else f"{record.total_s:.2f}"
    cells = [quantity(energy.total_j), quantity(energy.mean_w)] if has_energy and energy else []
    table.add_row("total", "", "", total, "", *cells)
    return table


def _energy_cells(energy: EnergyTotal | None) -> list[str]:
    if energy is None:
        return [quantity(None)] * 2
    few = "~" if energy.few_samples else ""
    return [few + quantity(energy.energy_j), quantity(energy.mean_w)]


def _add_phase(
    table: Table, name: str, phase: PhaseTimes, energy: Sequence[str], *, indent: int
) -> None:
    cells = [f"{seconds:.2f}" for seconds in (phase.min_s, phase.mean_s, phase.max_s)]
    cells.append(f"{phase.communication.mean_s:.2f}" if phase.communication else "")
    table.add_row("  " * indent + name, *cells, *energy)
    for part_name, part in (phase.parts or {}).items():
        _add_phase(table, part_name, part, [], indent=indent + 1)


def _usage_table(phases: Mapping[str, PhaseTimes]) -> Table:
    def mebibytes(size: Bytes | None) -> str:
        return f"{size.mean_bytes / MIB:,.1f}" if size else "unknown"

    return table_of(
        "use of the machine, mean over ranks",
        [(name, phase.usage) for name, phase in phases.items() if phase.usage],
        {
            "phase": lambda name, usage: name,
            "CPU (s)": lambda name, usage: f"{usage.cpu.mean_s:.2f}",
            "waits": lambda name, usage: f"{usage.voluntary_switches.mean_num:,.0f}",
            "preempted": lambda name, usage: f"{usage.involuntary_switches.mean_num:,.0f}",
            "page faults": lambda name, usage: (
                f"{usage.minor_faults.mean_num + usage.major_faults.mean_num:,.0f}"
            ),
            "read (MiB)": lambda name, usage: mebibytes(usage.read),
            "peak memory (MiB)": lambda name, usage: mebibytes(usage.peak_rss),
            "memory at its end (MiB)": lambda name, usage: mebibytes(usage.pss),
        },
    )


def _epoch_tables(epochs: Sequence[EpochFacts]) -> Iterator[str | Table]:
    def milliseconds(times: Seconds | None) -> str:
        return f"{1e3 * times.max_s:.2f}" if times else ""

    def factor(epoch: EpochFacts, i: int) -> str:
        return f"{_factors(epoch.efficiency)[i]:.3f}" if epoch.efficiency else ""

    def exposed(epoch: EpochFacts) -> str:
        seconds = epoch.exposed_communication
        return f"{seconds.mean_s:.3f}" if seconds else ""

    yield table_of(
        "epochs: slowest rank",
        [(epoch, epoch.steps or StepTimes(num=0)) for epoch in epochs],
        {
            "epoch": lambda epoch, steps: str(epoch.epoch),
            "train (s)": lambda epoch, steps: f"{epoch.train.max_s:.3f}",
            "step: median": lambda epoch, steps: milliseconds(steps.median),
            "99 % (ms)": lambda epoch, steps: milliseconds(steps.p99),
            "exposed (s)": lambda epoch, steps: exposed(epoch),
            "hidden": lambda epoch, steps: (
                "" if epoch.hidden_share is None else f"{epoch.hidden_share:.0%}"
            ),
            "balance": lambda epoch, steps: factor(epoch, 0),
            "communication": lambda epoch, steps: factor(epoch, 1),
            "POP": lambda epoch, steps: factor(epoch, 2),
        },
    )
    first = epochs[0].steps.first if epochs[0].steps else None
    if first:
        yield (
            f"The first step took {first.max_s:.2f} s, which includes compiling; the table leaves"
            " it out."
        )


def _factors(efficiency: Efficiency) -> tuple[float, float, float]:
    """Returns load balance, communication efficiency and parallel efficiency."""
    return (
        efficiency.load_balance,
        efficiency.communication_efficiency,
        efficiency.parallel_efficiency,
    )


def _efficiency(record: RunRecord) -> Iterator[str]:
    efficiency = record.efficiency
    if efficiency is None or record.num_ranks == 1:
        return
    if isinstance(efficiency, Absent):
        yield f"POP efficiency: not measured: {efficiency.reason}"
    else:
        balance, communication, parallel = _factors(efficiency)
        yield (
            f"POP efficiency {parallel:.3f} = load balance {balance:.3f} x communication"
            f" efficiency {communication:.3f}"
        )


def _communication_tables(communication: CommunicationFacts) -> Iterator[Table]:
    totals: dict[str, Callable[[Any], str]] = {
        "MiB": lambda each: f"{each.num_bytes / MIB:,.2f}",
        "s per rank": lambda each: f"{each.time.mean_s:.3f}",
    }
    if communication.collectives:
        columns: dict[str, Callable[[Any], str]] = {
            "library": lambda each: each.library,
            "operation": lambda each: each.name,
            "calls": lambda each: f"{each.num_calls:,}",
        }
        rows = [(each,) for each in communication.collectives]
        yield table_of("communication: all ranks", rows, columns | totals, num_words=2)
    if communication.message_sizes:
        columns = {
            "library": lambda each: each.library,
            "bytes": lambda each: f"{each.from_bytes:,} to {each.below_bytes - 1:,}",
            "messages": lambda each: f"{each.num_calls:,}",
        }
        rate: dict[str, Callable[[Any], str]] = {
            "MB/s of a rank": lambda each: f"{each.bytes_per_s / 1e6:,.1f}"
        }
        sizes = [(each,) for each in communication.message_sizes]
        yield table_of("messages by size", sizes, columns | totals | rate)


def _energy_tables(energy: EnergyFacts) -> Iterator[str | Table]:
    if energy.kind == "absent":
        yield f"energy: not measured: {energy.reason}"
        return
    yield table_of(
        "energy by kind of device",
        [(group,) for group in energy.devices],
        {
            "device": lambda group: group.label,
            "source": lambda group: group.source,
            "devices": lambda group: str(group.num_devices),
            "counted": lambda group: "yes" if group.counted else "no",
            "J of one: mean": lambda group: quantity(group.energy and group.energy.mean_j),
            "J: max": lambda group: quantity(group.energy and group.energy.max_j),
            "W of one: mean": lambda group: quantity(group.power and group.power.mean_w),
            "W: max": lambda group: quantity(group.power and group.power.max_w),
        },
        num_words=2,
    )
    yield from (f"note: {note}" for note in energy.notes)


def _energy_line(energy: EnergyFacts) -> str:
    covers = ", ".join(energy.covers)
    rate = f", read at {energy.power_hz:g} Hz" if energy.power_hz else ""
    return (
        f"energy ({energy.kind}): {energy.total_j:,.1f} J, {energy.mean_w:,.1f} W on average,"
        f" of {covers} in all{rate}"
    )


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
            "name": lambda name, parameter: name,
            "value": lambda name, parameter: str(parameter.value),
            "from": lambda name, parameter: parameter.origin,
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
