"""Searches hyperparameters of NT3 with Optuna: search_nt3.py NUM_TRIALS, also under mpirun.

Rank 0 asks Optuna, and all ranks train with what it suggests. The same command resumes the search.
"""

import sys
from collections.abc import Mapping
from typing import Any

from candle_p1.benchmark import find_benchmark
from candle_p1.distributed.comm import connect
from candle_p1.train import run

FLAGS = "--epochs 16 --output_dir output/search --experiment_id ."


class Search:
    """Optuna's study, in search.db; on rank 0."""

    def __init__(self, num_trials: int) -> None:
        import optuna

        self.num_trials, self.pruned = num_trials, optuna.trial.TrialState.PRUNED
        pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
        where = {"study_name": "nt3", "storage": "sqlite:///search.db", "load_if_exists": True}
        self.study = optuna.create_study(pruner=pruner, **where)

    def suggest(self) -> dict[str, Any] | None:
        """Begins a trial; one that was killed is never finished, and another takes its place."""
        if sum(each.state.is_finished() for each in self.study.trials) >= self.num_trials:
            return None
        trial = self.trial = self.study.ask()
        return {
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
            "batch_size": trial.suggest_categorical("batch_size", [10, 20, 40]),
            "dropout": trial.suggest_float("dropout", 0.0, 0.5),
            "run_id": f"trial{trial.number}",
        }

    def after_epoch(self, epoch: int, metrics: Mapping[str, float]) -> bool:
        """Returns whether to end the run, and so the training of all ranks."""
        self.trial.report(metrics["val_loss"], epoch)
        self.is_pruned = bool(self.trial.should_prune())
        return self.is_pruned

    def finish(self, losses: list[float]) -> None:
        """Ends the trial."""
        if self.is_pruned:
            self.study.tell(self.trial, state=self.pruned)
        else:
            self.study.tell(self.trial, losses[-1])


comm, nt3 = connect(), find_benchmark("nt3")
search = Search(int(sys.argv[1])) if comm.rank == 0 else None
while chosen := comm.broadcast(search.suggest() if search else None):
    params = nt3.initialize_parameters(argv=FLAGS.split()) | chosen
    history = run(nt3, params, search.after_epoch if search else None)
    if search:
        search.finish(history.history["val_loss"])
