"""candle-p1 forecast: time, energy, scaling efficiency and gains at sizes that were not run."""

from __future__ import annotations

from pathlib import Path

import click

from candle_p1.cli import base
from candle_p1.cli.model import PATH, comm_option
from candle_p1.errors import ModelError

MODES = ("strong", "weak", "batch")


@click.command(
    "forecast",
    cls=base.Command,
    examples=[
        "candle-p1 forecast nt3 --machine summit --ranks 384,3072",
        "candle-p1 forecast nt3 --ranks 8,16 --from output",
        "candle-p1 forecast nt3 --machine summit --ranks 3072 --mode weak --set network=2",
    ],
)
@click.argument("benchmark")
@click.option(
    "--machine",
    shell_complete=base.complete_machine,
    help="With --from, the machine whose number of ranks per node is used; by default that of the"
    " runs. Without --from, it must be summit, and the paper's values are used.",
)
@click.option("--ranks", type=base.NumberList(10**6), required=True, help="Numbers of ranks.")
@click.option(
    "--from",
    "directories",
    multiple=True,
    type=PATH,
    help="A directory of runs to predict from; repeatable.",
)
@click.option(
    "--mode",
    type=click.Choice(MODES),
    help="The mode of scaling; by default all for which there are data.",
)
@comm_option
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=VALUE",
    help="What if: another file_system or network (faster by a factor), epochs, epochs_per_rank"
    " or batch_size; repeatable.",
)
@base.json_option("the forecasts")
def command(
    benchmark: str,
    machine: str | None,
    ranks: list[int],
    directories: tuple[Path, ...],
    mode: str | None,
    comm: Path | None,
    changes: tuple[str, ...],
    json_file: Path | None,
) -> None:
    """Forecast time, energy, scaling efficiency and the gain of each loader at numbers of ranks.

    Also shows the largest scale with a scaling efficiency of at least 70 % and the numbers of ranks
    with the least energy and the least product of energy and time. All have intervals. Without
    --from, the forecast is made from the paper's printed values, beside the gains that it prints.
    """
    from candle_p1.cluster.machine import load_machine
    from candle_p1.modelling.communication import measured_for
    from candle_p1.modelling.forecast import Changes
    from candle_p1.reports import forecasts
    from candle_p1.training.screen import Screen

    screen, modes = Screen(), (mode,) if mode else MODES
    ranks, changed = sorted(ranks), Changes.parse(changes)
    if directories:
        per_node = (load_machine(machine).ranks_per_node or None) if machine else None
        runs = base.read_runs(directories, screen).runs
        allreduce_s = measured_for(comm, [r.record for r in runs]).allreduce_s if comm else None
        found = forecasts.forecast_runs(
            runs, benchmark, modes, ranks, changed, per_node, allreduce_s
        )
        if per_node:
            said = f"--machine {machine}: {per_node} ranks on each node"
            screen.say(f"{said}; rates and powers are still those of the machine of the runs")
    elif comm or machine != "summit" or mode == "batch":
        given = f"--machine {machine}: " if machine else ""
        raise ModelError(
            f"{given}give runs with --from DIR, or use the paper's values: --machine summit,"
            " without --comm and --mode batch"
        )
    else:
        found = forecasts.forecast_paper(benchmark, modes, ranks, changed)
    for each in found:
        for table in forecasts.forecast_tables(each):
            screen.say(table.to_rich())
        for line in (*each["published"], *each["notes"]):
            screen.say(line)
    base.write_json(json_file, found)
