"""A run's record in words and tables: in short after the run, in full for `candle-p1 show`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Record = Mapping[str, Any]

MIB = 2**20


def summary(record: Record) -> Iterator[str | Table]:
    """Yields the phases, the quality beside the naive predictor's, and what dominates."""
    yield _phase_table(record)
    yield from _quality(record)
    longest = max(record["phases"], key=lambda name: record["phases"][name]["mean_s"])
    share = record["phases"][longest]["mean_s"] / record["total_s"]
    yield f"{share:.0%} of the time went into {longest}"
    yield from _efficiency(record)
    energy = record["energy"]
    if energy["kind"] == "absent":
        yield "energy: not measured; candle-p1 show tells why"
    else:
        yield _energy_line(energy)
    data = "synthetic data" if record["data"]["synthetic"] else "the data given"
    rate = record["training"].get("samples_per_s")
    yield f"trained on {data}" + (f" at {rate:,.1f} samples/s" if rate else "")
    yield from _not_comparable(record)


def details(record: Record) -> Iterator[str | Table]:
    """Yields all that a record tells, of a run in any state."""
    yield from _head(record)
    if "phases" in record:
        yield _phase_table(record)
        yield _usage_table(record)
    yield from _epoch_tables(record)
    yield from _efficiency(record)
    yield from _communication_tables(record.get("communication", {}))
    if "energy" in record:
        yield from _energy_tables(record["energy"])
    if "quality" in record:
        yield from _quality(record)
    yield _parameter_table(record)
    yield from (f"warning: {text}" for text in record.get("warnings", []))
    yield from _not_comparable(record)


def _head(record: Record) -> Iterator[str | Table]:
    ranks = count(record["num_ranks"], "rank")
    nodes = count(record["num_nodes"], "node")
    yield f"{record['benchmark']}: {record['status']}, {ranks} on {nodes}, {record['started']}"
    if "failure" in record:
        failure = record["failure"]
        where = f" in {failure['phase']}" if failure.get("phase") else ""
        who = f" on rank {failure['rank']}" if failure.get("rank") is not None else ""
        yield f"failure{who}{where}: {failure['reason']}"
    if "ranks" in record:
        table = _table("ranks", "rank", "host", "node", "device", "threads", "peak memory (MiB)")
        for rank in record["ranks"]:
            table.add_row(
                str(rank["rank"]),
                rank["host"],
                str(rank["node"]),
                rank["device"],
                str(rank["threads"]),
                f"{rank['peak_rss_bytes'] / MIB:,.0f}",
            )
        yield table
    if "plan" in record:
        plan = record["plan"]
        yield (
            f"{count(plan['epochs_per_rank'], 'epoch')} on each rank,"
            f" {count(plan['steps_per_epoch'], 'step')} each, batch {plan['batch_size']},"
            f" learning rate {plan['learning_rate']:g}"
        )
    for role, file in record.get("data", {}).get("files", {}).items():
        yield (
            f"{role}: {file['path']}, {file['file_bytes'] / MIB:,.1f} MiB,"
            f" {file['num_rows']:,} x {file['num_columns']:,}, loaded in"
            f" {file['load']['max_s']:.2f} s by {record['data']['loader']}"
        )


def _phase_table(record: Record) -> Table:
    """Returns seconds per phase, with energy where it was measured."""
    energies = record.get("energy", {}).get("phases", {})
    has_energy = any("energy_j" in energy for energy in energies.values())
    ranks = count(record["num_ranks"], "rank")
    columns = ["phase", "min", "mean", "max", "waiting"]
    columns += ["energy (J)", "power (W)"] if has_energy else []
    table = _table(f"{record['benchmark']} on {ranks}: seconds per phase", *columns)
    for name, phase in record["phases"].items():
        energy = energies.get(name, {}) if has_energy else None
        _add_phase(table, name, phase, energy, indent=0)
    table.add_section()
    total = ["total", "", "", f"{record['total_s']:.2f}", ""]
    if has_energy:
        energy = record["energy"]
        total += [_quantity(energy.get("total_j")), _quantity(energy.get("mean_w"))]
    table.add_row(*total)
    return table


def _add_phase(
    table: Table, name: str, phase: Record, energy: Record | None = None, *, indent: int
) -> None:
    cells = [f"{phase[key]:.2f}" for key in ("min_s", "mean_s", "max_s")]
    waiting = phase.get("communication", {}).get("mean_s")
    cells.append("" if waiting is None else f"{waiting:.2f}")
    if energy is not None:
        few = "~" if energy.get("few_samples") else ""
        cells += [few + _quantity(energy.get("energy_j")), _quantity(energy.get("mean_w"))]
    table.add_row("  " * indent + name, *cells)
    for part_name, part in phase.get("parts", {}).items():
        _add_phase(table, part_name, part, indent=indent + 1)


def _usage_table(record: Record) -> Table:
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
    for name, phase in record["phases"].items():
        if "usage" in phase:
            usage = phase["usage"]
            faults = usage["minor_faults"]["mean_num"] + usage["major_faults"]["mean_num"]
            table.add_row(
                name,
                f"{usage['cpu']['mean_s']:.2f}",
                f"{usage['voluntary_switches']['mean_num']:,.0f}",
                f"{usage['involuntary_switches']['mean_num']:,.0f}",
                f"{faults:,.0f}",
                *(
                    f"{usage[key]['mean_bytes'] / MIB:,.1f}" if key in usage else "unknown"
                    for key in ("read", "peak_rss", "pss")
                ),
            )
    return table


def _epoch_tables(record: Record) -> Iterator[str | Table]:
    epochs = record.get("training", {}).get("epochs", [])
    if not epochs:
        return
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
        steps, efficiency = epoch["steps"], epoch.get("efficiency", {})
        exposed, hidden = epoch.get("exposed_communication"), epoch.get("hidden_share")
        table.add_row(
            str(epoch["epoch"]),
            f"{epoch['train']['max_s']:.3f}",
            *(f"{1e3 * steps[key]['max_s']:.2f}" if key in steps else "" for key in STEP_KEYS),
            "" if exposed is None else f"{exposed['mean_s']:.3f}",
            "" if hidden is None else f"{hidden:.0%}",
            *(f"{efficiency[key]:.3f}" if efficiency else "" for key in EFFICIENCIES),
        )
    yield table
    first = epochs[0]["steps"].get("first")
    if first:
        yield f"the first step took {first['max_s']:.2f} s, with compiling; it is not in the table"


STEP_KEYS = ("median", "p99")
EFFICIENCIES = ("load_balance", "communication_efficiency", "parallel_efficiency")


def _efficiency(record: Record) -> Iterator[str]:
    efficiency = record.get("efficiency")
    if efficiency is None or record["num_ranks"] == 1:
        return
    if "reason" in efficiency:
        yield f"efficiency: not measured: {efficiency['reason']}"
    else:
        balance, communication, parallel = (efficiency[key] for key in EFFICIENCIES)
        yield (
            f"parallel efficiency {parallel:.3f} = load balance {balance:.3f} x communication"
            f" efficiency {communication:.3f}, of the whole run"
        )


def _communication_tables(communication: Record) -> Iterator[str | Table]:
    if communication.get("collectives"):
        table = _table(
            "communication: all ranks",
            "library",
            "operation",
            "calls",
            "MiB",
            "s per rank",
            num_words=2,
        )
        for each in communication["collectives"]:
            table.add_row(
                each["library"],
                each["name"],
                f"{each['num_calls']:,}",
                f"{each['num_bytes'] / MIB:,.2f}",
                f"{each['time']['mean_s']:.3f}",
            )
        yield table
    if communication.get("message_sizes"):
        table = _table(
            "messages by size",
            "library",
            "bytes",
            "messages",
            "MiB",
            "s per rank",
            "MB/s of a rank",
        )
        for each in communication["message_sizes"]:
            table.add_row(
                each["library"],
                f"{each['from_bytes']:,} to {each['below_bytes'] - 1:,}",
                f"{each['num_calls']:,}",
                f"{each['num_bytes'] / MIB:,.2f}",
                f"{each['time']['mean_s']:.3f}",
                f"{each['bytes_per_s'] / 1e6:,.1f}",
            )
        yield table


def _energy_tables(energy: Record) -> Iterator[str | Table]:
    if energy["kind"] == "absent":
        yield "energy: not measured: " + energy["reason"]
        return
    yield _energy_line(energy)
    table = _table("energy by device", "node", "device", "source", "counted", "J", "W", "readings")
    for device in energy["devices"]:
        table.add_row(
            str(device["node"]),
            device["label"],
            device["source"],
            "yes" if device["counted"] else "no",
            _quantity(device.get("energy_j")),
            _quantity(device.get("mean_w")),
            str(device["num_samples"]),
        )
    yield table
    yield from (f"note: {note}" for note in energy["notes"])


def _energy_line(energy: Record) -> str:
    covers = ", ".join(energy["covers"])
    return (
        f"energy ({energy['kind']}): {energy['total_j']:,.1f} J, {energy['mean_w']:,.1f} W on"
        f" average, of {covers}"
    )


def _quality(record: Record) -> Iterator[str]:
    for name, figure in record["quality"].items():
        line = f"test {name} {_number(figure['value'])}"
        if "naive" in figure:
            line += f" (naive predictor {_number(figure['naive'])})"
        yield line


def _parameter_table(record: Record) -> Table:
    table = _table("parameters that are not the defaults", "name", "value", "from", num_words=3)
    for name, parameter in sorted(record["parameters"].items()):
        if parameter["origin"] != "default":
            table.add_row(name, str(parameter["value"]), parameter["origin"])
    return table


def _not_comparable(record: Record) -> Iterator[str]:
    training = record.get("training", {})
    for key, what in (
        ("traced", "Horovod's timeline was written"),
        ("profiled", "it was profiled"),
    ):
        if training.get(key):
            yield f"{what}: the times of this run are not to be compared"


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
