"""How epochs, batch size and learning rate depend on the number of ranks.

Pure functions and one frozen result, ScalingPlan, which is a section of the run's record. "The
paper" is Wu et al., "Performance, Energy, and Scalability Analysis and Improvement of Parallel
Cancer Deep Learning CANDLE Benchmarks", ICPP 2019, section 2.3: P ranks share the epochs (strong
scaling) or each train all of them (weak scaling), the learning rate grows with P, and the batch
size with a power of P.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, isqrt, sqrt
from typing import Any

from candle_p1.errors import ParameterError
from candle_p1.records.types import Plan
from candle_p1.text import count

EPOCHS_SCALINGS = ("strong", "strong_ceil", "weak", "none")
BATCH_SCALINGS = ("none", "linear", "sqrt", "cbrt")
LR_SCALINGS = ("none", "linear", "sqrt")
DATA_PARALLEL_LEVELS = ("epoch", "batch_step")


def comp_epochs(n: int, myrank: int = 0, nprocs: int = 1) -> int:
    """Returns the epochs of one rank when `nprocs` ranks share `n`: the paper's section 2.3.2.

    Every rank gets ``n // nprocs``, and the last one also the remainder. Ranks with unequal epochs
    cannot share collectives, so ScalingPlan refuses a remainder.
    """
    share, remainder = divmod(n, nprocs)
    return share + remainder if myrank == nprocs - 1 else share


def scale_batch_size(batch_size: int, num_ranks: int, scaling: str) -> int:
    """Returns the batch size of each rank: B x P, int(B x P^(1/2)) or int(B x P^(1/3)).

    Integers keep exact roots exact: int(100 x 64^(1/3)) is 400, but 399 in floating point.
    """
    if scaling == "none":
        return batch_size
    if scaling == "linear":
        return batch_size * num_ranks
    if scaling == "sqrt":
        return isqrt(batch_size**2 * num_ranks)
    root = int((batch_size**3 * num_ranks) ** (1 / 3)) + 1
    while root**3 > batch_size**3 * num_ranks:
        root -= 1
    return root


def share_bounds(num_items: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Returns [start, stop) of a rank's contiguous share; shares differ by at most one item."""
    return rank * num_items // num_ranks, (rank + 1) * num_items // num_ranks


def share_epochs(
    epochs: int, num_ranks: int, scaling: str | None = None, data_parallel: str = "epoch"
) -> tuple[str, int]:
    """Returns the resolved scaling of the epochs, and the epochs that each rank trains.

    By default it is strong, as in the paper, but none for a single epoch, which cannot be shared
    (as the paper's P1B3), and at the batch-step level, where the shards already divide the work.

    Raises:
        ParameterError: Strong scaling would give the ranks unequal epochs; the message suggests the
            nearest numbers that do not.
    """
    if scaling is None:
        scaling = "strong" if data_parallel == "epoch" and epochs > 1 else "none"
    if scaling in ("weak", "none"):
        return scaling, epochs
    if scaling == "strong_ceil":
        return scaling, ceil(epochs / num_ranks)
    first, last = comp_epochs(epochs, 0, num_ranks), comp_epochs(epochs, num_ranks - 1, num_ranks)
    if first == last:
        return scaling, first
    below, above = epochs // num_ranks * num_ranks, ceil(epochs / num_ranks) * num_ranks
    nearest = f"--epochs {below} or --epochs {above}" if below else f"--epochs {above}"
    raise ParameterError(
        f"{epochs} epochs cannot be divided among {num_ranks} ranks: comp_epochs gives {first} to"
        f" most and {last} to the last, and ranks with unequal steps hang. Use {nearest}, or"
        f" --epochs_scaling strong_ceil to train {above // num_ranks} on each rank"
    )


def epochs_of_ranks(params: Mapping[str, Any], num_ranks: int) -> int:
    """Returns the epochs that each rank trains with these parameters; raises as `share_epochs`."""
    scaling, level = params["epochs_scaling"], params["data_parallel"]
    return share_epochs(params["epochs"], num_ranks, scaling, level)[1]


def remaining_epochs(saved: ScalingPlan, num_ranks: int, epoch: int, step: int) -> int:
    """Returns the epochs that each rank still trains if `num_ranks` resume from a checkpoint.

    Ranks that share the epochs share what is left of them, rounded up to whole epochs, where an
    epoch that is not complete counts as the fraction that is left. Otherwise each rank trains the
    rest, and begins an incomplete epoch anew. The checkpoint was written after `epoch` epochs of
    the saved plan and `step` steps of the next one.
    """
    steps_left = (saved.epochs_per_rank - epoch) * saved.steps_per_epoch - step
    if saved.epochs_scaling in ("strong", "strong_ceil"):
        return -(-saved.num_ranks * steps_left // (num_ranks * saved.steps_per_epoch))
    return -(-steps_left // saved.steps_per_epoch)


def continued_learning_rate(saved_rate: float, saved: ScalingPlan, plan: ScalingPlan) -> float:
    """Returns the learning rate with which another number of ranks goes on from a checkpoint.

    It differs from the new plan's by the same factor as the saved one from the old plan's, which is
    not 1 after a reduction on a plateau, for example.
    """
    if saved.learning_rate == 0:
        return plan.learning_rate
    return plan.learning_rate * (saved_rate / saved.learning_rate)


class ScalingPlan(Plan):
    """What every rank does: the same on all ranks, so that all take the same number of steps."""

    @classmethod
    def make(
        cls,
        *,
        num_ranks: int,
        epochs: int,
        batch_size: int,
        learning_rate: float,
        num_samples: int,
        epochs_scaling: str | None = None,
        batch_scaling: str = "none",
        lr_scaling: str = "linear",
        warmup_epochs: int = 0,
        warmup_from: float | None = None,
        data_parallel: str = "epoch",
        max_steps: int = 0,
        drop_remainder: bool = False,
        epochs_per_rank: int | None = None,
    ) -> ScalingPlan:
        """Returns the plan; epochs, batch size and learning rate are those before scaling.

        The epochs are those of all ranks together, if they share them; a checkpoint of other ranks
        decides `epochs_per_rank` (see `remaining_epochs`). The batch size is the samples of a step,
        `num_samples` the size of the training set, and `max_steps` limits an epoch, unless it is 0.
        The warm-up begins at `warmup_from`, or else at the learning rate.

        Raises:
            ParameterError: The ranks would not all take the same number of steps, or a rank would
                have nothing to do. The message suggests values that work.
        """
        if num_samples < 1:
            raise ParameterError("there are no training samples")
        if epochs_per_rank is None:
            epochs_scaling, epochs_per_rank = share_epochs(
                epochs, num_ranks, epochs_scaling, data_parallel
            )
        else:
            epochs_scaling, _ = share_epochs(epochs, 1, epochs_scaling, data_parallel)
        # Shards differ by one sample; every rank uses as many samples as the smallest shard has.
        samples = num_samples if data_parallel == "epoch" else num_samples // num_ranks
        if samples == 0:
            raise ParameterError(
                f"data_parallel batch_step needs at least one sample for each of the {num_ranks}"
                f" ranks; there are {num_samples}"
            )
        scaled_batch_size = scale_batch_size(batch_size, num_ranks, batch_scaling)
        steps = ceil(samples / scaled_batch_size)
        if drop_remainder:
            steps = samples // scaled_batch_size
            if not steps:
                raise ParameterError(
                    f"batch_size {scaled_batch_size} exceeds the {samples} samples that a rank has"
                    " to train on, and this benchmark trains on whole batches: use a smaller one"
                )
        steps = min(steps, max_steps or steps)
        samples = min(samples, steps * scaled_batch_size)
        factors = {"none": 1, "linear": num_ranks, "sqrt": sqrt(num_ranks)}
        return cls(
            num_ranks=num_ranks,
            epochs_scaling=epochs_scaling,
            batch_scaling=batch_scaling,
            lr_scaling=lr_scaling,
            data_parallel=data_parallel,
            epochs=epochs,
            epochs_per_rank=epochs_per_rank,
            base_batch_size=batch_size,
            batch_size=scaled_batch_size,
            global_batch_size=scaled_batch_size * num_ranks,
            base_learning_rate=learning_rate,
            learning_rate=learning_rate * factors[lr_scaling],
            warmup_epochs=warmup_epochs,
            warmup_learning_rate=learning_rate if warmup_from is None else warmup_from,
            samples_per_epoch=samples,
            steps_per_epoch=steps,
        )

    def explain(self) -> str:
        """Returns the plan as a sentence."""
        ranks, epochs = count(self.num_ranks, "rank"), count(self.epochs_per_rank, "epoch")
        batch = f"batch {self.batch_size}"
        if self.batch_size != self.base_batch_size:
            batch += f" ({self.base_batch_size}, {self.batch_scaling})"
        rate = f"learning rate {self.learning_rate:g}"
        if self.learning_rate != self.base_learning_rate:
            rate += f" ({self.base_learning_rate:g}, {self.lr_scaling})"
        return (
            f"{epochs} on each of {ranks} ({self.epochs} requested, scaling"
            f" {self.epochs_scaling}), {self.steps_per_epoch} steps each, {batch}, {rate}"
        )

    @property
    def warnings(self) -> list[str]:
        """What the user may not expect."""
        if self.warmup_epochs and self.warmup_learning_rate == self.learning_rate:
            return [f"the warm-up has no effect: it begins at {self.learning_rate:g}, too"]
        if self.warmup_epochs <= self.epochs_per_rank:
            return []
        return [
            f"the warm-up takes {count(self.warmup_epochs, 'epoch')}, but each rank trains only"
            f" {self.epochs_per_rank}: the learning rate does not reach {self.learning_rate:g}"
        ]


def warmup_learning_rate(plan: ScalingPlan, step: int) -> float:
    """Returns the learning rate of a step, counted from 0 over all epochs of a rank.

    It rises linearly to the scaled learning rate over the warm-up epochs: Goyal et al., "Accurate,
    Large Minibatch SGD" (arXiv:1706.02677), section 2.2, "gradual warmup".
    """
    num_warmup_steps = plan.warmup_epochs * plan.steps_per_epoch
    if step >= num_warmup_steps:
        return plan.learning_rate
    base, target = plan.warmup_learning_rate, plan.learning_rate
    return base + (target - base) * step / num_warmup_steps
