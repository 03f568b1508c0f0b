"""candle-p1 predict: time, energy, scaling efficiency and gains at sizes that were not run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from candle_p1.cli.base import Command, complete_machine, write_output
from candle_p1.errors import ModelError, ParameterError


@click.command(
    "predict",
    cls=Command,
    examples=[
        "candle-p1 predict nt3 --machine summit --ranks 384,3072",
        "candle-p1 predict nt3 --ranks 8,16 --from output",
        "candle-p1 predict nt3 --machine summit --ranks 3072 --mode weak --set network=2",
    ],
)
@click.argument("benchmark")
@click.option(
    "--machine",
    shell_complete=complete_machine,
    help="The machine. With --from, its ranks per node are used, by default those of the runs."
    " Without, it has to be summit: the paper's published values are used.",
)
@click.option("--ranks", "ranks_text", required=True, help="Numbers of ranks, such as 384,3072.")
@click.option(
    "--from",
    "directories",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A directory of runs to predict from; may be given several times.",
)
@click.option(
    "--mode",
    type=click.Choice(("strong", "weak", "batch")),
    help="The mode of scaling; by default all for which there is something to predict from.",
)
@click.option(
    "--comm",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A measurement of communication, from bench comm, to be used with --from.",
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=VALUE",
    help="What if: file_system or network faster by a factor, or other epochs, epochs_per_rank"
    " or batch_size; may be given several times.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the predictions to this file.",
)
def command(
    benchmark: str,
    machine: str | None,
    ranks_text: str,
    directories: tuple[Path, ...],
    mode: str | None,
    comm: Path | None,
    changes: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Predict time, energy, scaling efficiency and the gain of each loader on numbers of ranks.

    Also said is the largest scale that holds a scaling efficiency of 70 %, and the numbers of ranks
    that take the least energy and the least product of energy and time. All have intervals. Without
    --from, the paper's printed values are used, and the gains that it prints are shown beside.
    """
    from candle_p1.modelling.changes import parse_changes
    from candle_p1.modelling.communication import measured_for
    from candle_p1.modelling.forecast import parse_ranks
    from candle_p1.reports.points import MODES
    from candle_p1.reports.prediction import PAPER_MODES, predict_paper, predict_runs
    from candle_p1.reports.runs import read_runs
    from candle_p1.training.screen import Screen

    screen = Screen()
    ranks, changed = parse_ranks(ranks_text), parse_changes(changes)
    if directories:
        ranks_per_node = None
        if machine:
            from candle_p1.cluster.machine import load_machine

            ranks_per_node = load_machine(machine).ranks_per_node or None
        runs = read_runs(directories)
        for record, reason in runs.problems.items():
            screen.warn(f"{record}: {reason}")
        records = [run.record for run in runs.runs]
        allreduce_s = measured_for(comm, records).allreduce_s if comm else None
        modes = (mode,) if mode else tuple(MODES)
        predictions = predict_runs(
            runs, benchmark, modes, ranks, changed, ranks_per_node, allreduce_s
        )
        if ranks_per_node:
            screen.say(
                f"--machine {machine}: {ranks_per_node} ranks on each node; all rates and powers"
                " are still those of the machine of the runs"
            )
    else:
        if comm:
            raise ParameterError(
                "--comm is used with --from DIR: published values have no use for it"
            )
        if machine != "summit":
            raise ModelError(
                f"--machine {machine}: the paper prints enough only for summit; give runs"
                " with --from DIR"
                if machine
                else "give runs with --from DIR, or --machine summit for the paper's values"
            )
        if mode == "batch":
            raise ModelError("--mode batch: the paper prints enough only for strong and weak")
        modes = (mode,) if mode else PAPER_MODES
        predictions = predict_paper(benchmark, modes, ranks, changed)
    for prediction in predictions:
        for table in prediction.tables():
            screen.say(table.to_rich())
        for each in prediction.published:
            screen.say(str(each))
        for note in prediction.notes:
            screen.say(note)
    if json_path:
        content = json.dumps([p.to_dict() for p in predictions], indent=2, allow_nan=False)
        write_output("--json", json_path, content + "\n")
        screen.say(f"predictions: {json_path}")
