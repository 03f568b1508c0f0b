"""A run's record in words and tables: in short after the run, in full for `candle-p1 show`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from candle_p1.errors import RecordError
from candle_p1.records.types import Absent
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from candle_p1.records.types import (
        CommunicationFacts,
        Efficiency,
        EnergyFacts,
        EnergyTotal,
        EpochFacts,
        PhaseTimes,
        RankFacts,
        RunRecord,
    )

MIB = 2**20


def summary(record: RunRecord) -> Iterator[str | Table]:
    """Yields the phases, the quality beside the naive predictor's, and what dominates.

    Args:
        record: Of a run that is ok.
    """
    phases, total_s, energy = record.phases, record.total_s, record.energy
    training, trained_on = record.training, record.data
    if not (phases and total_s and energy and training and trained_on):
        raise RecordError(f"the run is {record.status}: it has no summary")
    yield _phase_table(record, phases)
    yield from _quality(record)
    longest = max(phases, key=lambda name: phases[name].mean_s)
    share = phases[longest].mean_s / total_s
    yield f"{share:.0%} of the time went into {longest}"
    yield from _efficiency(record)
    if energy.kind == "absent":
        yield "energy: not measured; candle-p1 show says why"
    else:
        yield _energy_line(energy)
    data = "synthetic data" if trained_on.synthetic else "the data given"
    rate = training.samples_per_s
    yield f"trained on {data}" + (f" at {rate:,.1f} samples/s" if rate else "")
    yield from _not_comparable(record)


def details(record: RunRecord) -> Iterator[str | Table]:
    """Yields everything that a record says, of a run in any state."""
    yield from _head(record)
    if record.phases:
        yield _phase_table(record, record.phases)
        yield _usage_table(record.phases)
    if record.training and record.training.epochs:
        yield from _epoch_tables(record.training.epochs)
    yield from _efficiency(record)
    if record.communication:
        yield from _communication_tables(record.communication)
    if record.energy:
        yield from _energy_tables(record.energy)
    yield from _quality(record)
    yield _parameter_table(record)
    yield from (f"warning: {text}" for text in record.warnings or ())
    yield from _not_comparable(record)


def _head(record: RunRecord) -> Iterator[str | Table]:
    ranks = count(record.num_ranks, "rank")
    nodes = f" on {count(record.num_nodes, 'node')}" if record.num_nodes else ""
    yield f"{record.benchmark}: {record.status}, {ranks}{nodes}, {record.started}"
    if record.failure:
        where = f" in {record.failure.phase}" if record.failure.phase else ""
        who = f" on rank {record.failure.rank}" if record.failure.rank is not None else ""
        yield f"failure{who}{where}: {record.failure.reason}"
    if record.ranks:
        yield _rank_table(record.ranks)
    if record.peak_rss:
        low, high = (size / MIB for size in (record.peak_rss.min_bytes, record.peak_rss.max_bytes))
        yield f"peak memory of a rank: {low:,.0f} to {high:,.0f} MiB"
    if record.plan:
        plan = record.plan
        yield (
            f"{count(plan.epochs_per_rank, 'epoch')} on each rank,"
            f" {count(plan.steps_per_epoch, 'step')} each, batch {plan.batch_size},"
            f" learning rate {plan.learning_rate:g}"
        )
    for role, file in record.data.files.items() if record.data else ():
        line = f"{role}: {file.path}, {file.file_bytes / MIB:,.1f} MiB"
        if file.num_rows is not None and file.num_columns is not None:
            line += f", {file.num_rows:,} x {file.num_columns:,}"
        if record.data and file.load:
            line += f", loaded in {file.load.max_s:.2f} s by {record.data.loader}"
        yield line


def _rank_table(ranks: Sequence[RankFacts]) -> Table:
    """Returns the ranks, those of a node that are alike in one row."""
    table = _table("ranks", "ranks", "host", "node", "device", "threads", num_words=2)
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        key = (rank.host, str(rank.node), rank.device, str(rank.threads))
        alike.setdefault(key, []).append(rank.rank)
    for facts, numbers in alike.items():
        first, last = numbers[0], numbers[-1]
        is_range = last - first + 1 == len(numbers)
        shown = f"{first} to {last}" if is_range and first != last else ", ".join(map(str, numbers))
        table.add_row(shown, *facts)
    return table


def _phase_table(record: RunRecord, phases: Mapping[str, PhaseTimes]) -> Table:
    """Returns seconds per phase, with energy where it was measured."""
    energy = record.energy
    has_energy = energy is not None and any(
        phase.energy_j is not None for phase in energy.phases.values()
    )
    columns = ["phase", "min", "mean", "max", "waiting"]
    columns += ["energy (J)", "power (W)"] if has_energy else []
    ranks = count(record.num_ranks, "rank")
    table = _table(f"{record.benchmark} on {ranks}: seconds per phase", *columns)
    for name, phase in phases.items():
        of_phase = energy.phases.get(name) if energy else None
        _add_phase(table, name, phase, _energy_cells(of_phase) if has_energy else [], indent=0)
    table.add_section()
    total = "" if record.total_s is None else f"{record.total_s:.2f}"
    cells = [_quantity(energy.total_j), _quantity(energy.mean_w)] if has_energy and energy else []
    table.add_row("total", "", "", total, "", *cells)
    return table


def _energy_cells(energy: EnergyTotal | None) -> list[str]:
    if energy is None:
        return [_quantity(None)] * 2
    few = "~" if energy.few_samples else ""
    return [few + _quantity(energy.energy_j), _quantity(energy.mean_w)]


def _add_phase(
    table: Table, name: str, phase: PhaseTimes, energy: Sequence[str], *, indent: int
) -> None:
    cells = [f"{seconds:.2f}" for seconds in (phase.min_s, phase.mean_s, phase.max_s)]
    cells.append(f"{phase.communication.mean_s:.2f}" if phase.communication else "")
    table.add_row("  " * indent + name, *cells, *energy)
    for part_name, part in (phase.parts or {}).items():
        _add_phase(table, part_name, part, [], indent=indent + 1)


def _usage_table(phases: Mapping[str, PhaseTimes]) -> Table:
    table = _table(
        "use of the machine, mean over ranks",
        "phase",
        "CPU (s)",
        "waits",
        "preempted",
        "page faults",
        "read (MiB)",
        "peak memory (MiB)",
        "memory at its end (MiB)",
    )
    for name, phase in phases.items():
        if phase.usage:
            usage = phase.usage
            faults = usage.minor_faults.mean_num + usage.major_faults.mean_num
            table.add_row(
                name,
                f"{usage.cpu.mean_s:.2f}",
                f"{usage.voluntary_switches.mean_num:,.0f}",
                f"{usage.involuntary_switches.mean_num:,.0f}",
                f"{faults:,.0f}",
                *(
                    f"{size.mean_bytes / MIB:,.1f}" if size else "unknown"
                    for size in (usage.read, usage.peak_rss, usage.pss)
                ),
            )
    return table


def _epoch_tables(epochs: Sequence[EpochFacts]) -> Iterator[str | Table]:
    table = _table(
        "epochs: slowest rank",
        "epoch",
        "train (s)",
        "step: median",
        "99 % (ms)",
        "exposed (s)",
        "hidden",
        "balance",
        "communication",
        "parallel",
    )
    for epoch in epochs:
        steps, exposed, hidden = epoch.steps, epoch.exposed_communication, epoch.hidden_share
        table.add_row(
            str(epoch.epoch),
            f"{epoch.train.max_s:.3f}",
            *(
                f"{1e3 * times.max_s:.2f}" if times else ""
                for times in ((steps.median, steps.p99) if steps else (None, None))
            ),
            "" if exposed is None else f"{exposed.mean_s:.3f}",
            "" if hidden is None else f"{hidden:.0%}",
            *(f"{value:.3f}" for value in _factors(epoch.efficiency)),
        )
    yield table
    first = epochs[0].steps.first if epochs[0].steps else None
    if first:
        yield (
            f"The first step took {first.max_s:.2f} s, which includes compiling; the table leaves"
            " it out."
        )


def _factors(efficiency: Efficiency | None) -> tuple[float, ...]:
    """Returns load balance, communication efficiency and parallel efficiency."""
    if efficiency is None:
        return ()
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
        yield f"efficiency: not measured: {efficiency.reason}"
    else:
        balance, communication, parallel = _factors(efficiency)
        yield (
            f"parallel efficiency {parallel:.3f} = load balance {balance:.3f} x communication"
            f" efficiency {communication:.3f}, over the whole run"
        )


def _communication_tables(communication: CommunicationFacts) -> Iterator[Table]:
    if communication.collectives:
        table = _table(
            "communication: all ranks",
            "library",
            "operation",
            "calls",
            "MiB",
            "s per rank",
            num_words=2,
        )
        for each in communication.collectives:
            table.add_row(
                each.library,
                each.name,
                f"{each.num_calls:,}",
                f"{each.num_bytes / MIB:,.2f}",
                f"{each.time.mean_s:.3f}",
            )
        yield table
    if communication.message_sizes:
        table = _table(
            "messages by size",
            "library",
            "bytes",
            "messages",
            "MiB",
            "s per rank",
            "MB/s of a rank",
        )
        for size in communication.message_sizes:
            table.add_row(
                size.library,
                f"{size.from_bytes:,} to {size.below_bytes - 1:,}",
                f"{size.num_calls:,}",
                f"{size.num_bytes / MIB:,.2f}",
                f"{size.time.mean_s:.3f}",
                f"{size.bytes_per_s / 1e6:,.1f}",
            )
        yield table


def _energy_tables(energy: EnergyFacts) -> Iterator[str | Table]:
    if energy.kind == "absent":
        yield f"energy: not measured: {energy.reason}"
        return
    yield _energy_line(energy)
    table = _table(
        "energy by kind of device",
        "device",
        "source",
        "devices",
        "counted",
        "J of one: mean",
        "max",
        "W of one: mean",
        "max",
        num_words=2,
    )
    for group in energy.devices:
        joules, watts = group.energy, group.power
        table.add_row(
            group.label,
            group.source,
            str(group.num_devices),
            "yes" if group.counted else "no",
            _quantity(joules.mean_j if joules else None),
            _quantity(joules.max_j if joules else None),
            _quantity(watts.mean_w if watts else None),
            _quantity(watts.max_w if watts else None),
        )
    yield table
    yield from (f"note: {note}" for note in energy.notes)


def _energy_line(energy: EnergyFacts) -> str:
    covers = ", ".join(energy.covers)
    return (
        f"energy ({energy.kind}): {energy.total_j:,.1f} J, {energy.mean_w:,.1f} W on average,"
        f" of {covers}"
    )


def _quality(record: RunRecord) -> Iterator[str]:
    for name, figure in (record.quality or {}).items():
        line = f"test {name} {_number(figure.value)}"
        if "naive" in figure.model_fields_set:
            line += f" (naive predictor {_number(figure.naive)})"
        yield line


def _parameter_table(record: RunRecord) -> Table:
    table = _table("parameters that are not the defaults", "name", "value", "from", num_words=3)
    for name, parameter in sorted(record.parameters.items()):
        if parameter.origin != "default":
            table.add_row(name, str(parameter.value), parameter.origin)
    return table


def _not_comparable(record: RunRecord) -> Iterator[str]:
    training = record.training
    if training and training.traced:
        yield "Horovod's timeline was written: do not compare the times of this run"
    if training and training.profiled:
        yield "the run was profiled: do not compare its times"


def _table(title: str, *columns: str, num_words: int = 1) -> Table:
    """Returns an empty table, whose first columns are words and the others numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < num_words else "right", overflow="fold")
    return table


def _quantity(value: float | None) -> str:
    return "absent" if value is None else f"{value:,.1f}"


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.4f}"


def as_cells(table: Table) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Returns the headings and the rows of a table, as text."""
    headings = [str(column.header) for column in table.columns]
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    return headings, list(zip(*cells, strict=True))
