"""What an engine of data-parallel training has to do, and the test that it does it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.distributed.backend import AUTO
from candle_p1.errors import DistributedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from candle_p1.distributed.allreduce_log import AllreduceLog
    from candle_p1.distributed.comm import Communicator
    from candle_p1.instrument.collectives import CommunicationLog

HOROVOD = "horovod"
AVERAGING_CHOICES = (AUTO, HOROVOD)
"""What averages gradients on CPUs of one node: memory that the ranks share, or Horovod."""
OF_HOROVOD = re.compile(
    "HOROVOD_(AUTOTUNE|BATCH_|CACHE_|CPU_OPERATIONS|CYCLE_TIME|DISABLE_GROUP|ENABLE_XLA|FUSION"
    "|HIERARCHICAL|MPI_THREADS|NUM_|THREAD_AFFINITY)"
)
"""What the names of variables begin with that change how Horovod averages."""
COMPRESSIONS = ("none", "fp16")
"""How gradients are sent; see candle_p1.distributed.compression."""


def warn_of_horovod(started: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Returns a warning if variables of Horovod are set that have no effect.

    Args:
        started: What `Engine.start` returned.
        environ: The environment.
    """
    averaging = started.get("settings", {}).get("averaging", started["backend"])
    why = {
        "serial": "a single rank averages no gradients",
        "jax": "JAX averages the gradients",
        HOROVOD: "several ranks train without XLA",
    }.get(averaging, f"{averaging} averages the gradients, unless --averaging is horovod")
    ignored = re.compile("HOROVOD_ENABLE_XLA") if averaging == HOROVOD else OF_HOROVOD
    # This package itself sets 0.
    names = [n for n in sorted(environ) if ignored.match(n) and environ[n] not in ("", "0")]
    return [f"{', '.join(names)}: no effect, because {why}"] if names else []


class Engine(ABC):
    """Trains one model on the ranks of a job. All ranks must call its methods, in the same order.

    Between its steps a model is an ordinary Keras model of each process, whatever the engine: its
    variables are in the memory of this rank's device, so that callbacks, metrics, evaluations and
    checkpoints know nothing about engines.

    Args:
        comm: The ranks.
        backend: Keras's backend.
    """

    name: str
    """As the record names it."""

    def __init__(self, comm: Communicator, backend: str) -> None:
        self.comm, self.backend = comm, backend

    def join(self) -> None:  # noqa: B027
        """Joins the processes of the job, before the framework looks for devices.

        Raises:
            CandleError: They cannot be joined; the same on every rank.
        """

    @abstractmethod
    def start(
        self,
        *,
        stall_shutdown_s: int = 300,
        deterministic: bool = True,
        timeline: Path | None = None,
        averaging: str = AUTO,
    ) -> dict[str, Any]:
        """Starts averaging, after the devices are set up.

        Args:
            stall_shutdown_s: The time after which a stalled collective ends with an error on every
                rank; 0: never.
            deterministic: Whether repeated runs must be bit-identical.
            timeline: The file into which rank 0 traces the engine's operations; None: no file.
            averaging: One of AVERAGING_CHOICES, for the engine that has them.

        Returns:
            The record's section "distributed".

        Raises:
            CandleError: It cannot be started; the same on every rank.
        """

    def uses_xla(self, *, is_gpu: bool) -> bool:
        """Returns whether Keras may compile the steps of a model with XLA."""
        return self.backend == "jax"

    def make_log(self, log: CommunicationLog, *, is_gpu: bool) -> AllreduceLog | None:
        """Returns the log of one model's gradient allreduces; None: they cannot be timed."""
        return None

    @abstractmethod
    def average(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        compression: str = "none",
        log: AllreduceLog | None = None,
    ) -> list[Any]:
        """Returns the gradients averaged over ranks.

        Args:
            gradients: Tensors; None stays None, and must be None on every rank.
            variables: The Keras variables of the gradients, in the same order.
            compression: One of COMPRESSIONS.
            log: Records the allreduces.
        """

    def can_update(self, optimizer: Any, compression: str = "none") -> bool:
        """Returns whether `update` can take the place of `average` and the optimizer's own step."""
        return False

    def update(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        learning_rate: Any,
        log: AllreduceLog | None = None,
    ) -> None:
        """Averages gradients over ranks and updates the variables, in one pass over memory.

        Args:
            optimizer: One for which `can_update` is true.
            gradients: Tensors.
            variables: Their Keras variables, in the same order.
            learning_rate: The learning rate of this step.
            log: Records the allreduces.
        """
        raise NotImplementedError

    def at_last_pass(
        self,
        optimizer: Any,
        average: Callable[[Sequence[Any]], list[Any]],
        gradients: Sequence[Any],
    ) -> list[Any]:
        """Returns the averages of the mean gradients of several passes.

        Args:
            optimizer: The optimizer that accumulates them, and is about to clip their mean.
            average: Averages them over ranks.
            gradients: The mean gradients.
        """
        return average(gradients)

    def prepare(self, model: Any) -> None:  # noqa: B027
        """Lets a model, compiled with an optimizer of `distribute_optimizer`, train with it."""

    @abstractmethod
    def broadcast_state(self, model: Any, root: int = 0) -> None:
        """Copies the root's weights and optimizer state to every rank, before training.

        The optimizer must be built. The time that is recorded is that of the broadcast alone,
        without the framework's preparation. Random states (of dropout, for example) are not copied,
        so ranks draw different numbers.
        """

    def distribute_optimizer(
        self, optimizer: Any, compression: str = "none", log: AllreduceLog | None = None
    ) -> Any:
        """Returns an optimizer of the same class and settings that first averages gradients.

        Since averaging comes first, clipping acts on the averaged gradients, and the overflow check
        of loss scaling, which is a conditional, contains no collective. With one allreduce per
        gradient, communication can overlap with back-propagation. An optimizer that accumulates the
        gradients of several passes averages only their mean. Where nothing happens to the averages
        before the update, the engine may do both at once.

        Args:
            optimizer: A built-in or custom ``keras.optimizers.Optimizer``, not yet built.
            compression: One of COMPRESSIONS.
            log: Records the allreduces.

        Raises:
            DistributedError: The optimizer has already been built; its state would be lost.
        """
        if self.comm.size == 1:
            return optimizer
        if optimizer.built:
            raise DistributedError(
                "an optimizer must be distributed before it is built, or its state would be lost"
            )
        from keras.optimizers import LossScaleOptimizer

        plain, engine = type(optimizer), self

        class Distributed(plain):  # type: ignore[misc,valid-type]
            _updates_at_once = False

            def _average(self, grads: Sequence[Any], variables: Any = None) -> list[Any]:
                variables = self._trainable_variables if variables is None else variables
                return engine.average(grads, variables, compression, log)

            def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
                self._updates_at_once = self.built and engine.can_update(self, compression)
                if not (self._updates_at_once or self.gradient_accumulation_steps):
                    grads = self._average(grads, trainable_variables)
                super().apply(grads, trainable_variables)

            def _backend_update_step(
                self, grads: Sequence[Any], trainable_variables: Any, learning_rate: Any
            ) -> None:
                if self._updates_at_once:
                    engine.update(self, grads, trainable_variables, learning_rate, log)
                else:
                    super()._backend_update_step(grads, trainable_variables, learning_rate)

            def stateless_apply(
                self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
            ) -> Any:
                if isinstance(self, LossScaleOptimizer):  # the only one that does not call apply
                    grads = self._average(grads)
                return super().stateless_apply(optimizer_variables, grads, trainable_variables)

            def _clip_gradients(self, grads: Sequence[Any]) -> Any:
                if self.gradient_accumulation_steps:  # Keras calls this with the mean of the passes
                    grads = engine.at_last_pass(self, self._average, grads)
                return super()._clip_gradients(grads)

        Distributed.__name__ = f"Distributed{plain.__name__}"
        Distributed.__qualname__ = Distributed.__name__
        return Distributed.from_config(optimizer.get_config())

    def self_test(
        self, plain_optimizer: Callable[[], Any], make_optimizer: Callable[[], Any] | None = None
    ) -> None:
        """Tests, by training a small linear model, that gradients are averaged.

        Each rank trains for a few steps on its own samples, through ``compile`` and
        ``train_on_batch`` as the real model will. All replicas must end up bit-identical, and with
        the weights that one process gets when it trains with the plain optimizer on the samples of
        all ranks together.

        Args:
            plain_optimizer: Makes an optimizer without distribution.
            make_optimizer: Makes the optimizer to be tested; None: `distribute_optimizer` of the
                plain one.

        Raises:
            DistributedError: They are not averaged; the same on every rank.
        """
        comm = self.comm
        if comm.size == 1:
            return
        make_optimizer = make_optimizer or (lambda: self.distribute_optimizer(plain_optimizer()))
        generator = np.random.default_rng(20190805)  # the same on every rank
        num_samples, num_features = 4, 3
        x = generator.normal(size=(comm.size, num_samples, num_features)).astype("float32")
        y = generator.normal(size=(comm.size, num_samples, 1)).astype("float32")
        mine = self._trained(make_optimizer(), x[comm.rank], y[comm.rank], self.prepare)
        reference = self._trained(
            plain_optimizer(), np.concatenate(list(x)), np.concatenate(list(y))
        )
        problem = None
        if comm.find_different(mine.tobytes()):
            problem = "their weights differ after the same steps"
        elif not np.allclose(mine, reference, rtol=1e-4, atol=1e-6):
            problem = "their weights are not those of one process with all samples"
        if comm.any(problem is not None):
            raise DistributedError(
                f"gradients are not averaged over the {comm.size} ranks"
                f" ({problem or 'as another rank reports'}): use the optimizer and the preparation"
                " of candle_p1.distributed.engines (under Keras 3 Horovod's own"
                " DistributedOptimizer does not average)"
            ).on_all_ranks()

    def _trained(
        self, optimizer: Any, x: Any, y: Any, prepare: Callable[[Any], None] = lambda model: None
    ) -> Any:
        """Returns the weights of a linear model after two updates."""
        import keras

        # Gradients are named after layers, and Keras's names depend on what else a rank has made.
        layer = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="ones", dtype="float32", name="layer"
        )
        model = keras.Sequential([keras.layers.Input(x.shape[1:]), layer], name="self_test")
        xla = self.uses_xla(is_gpu=False)
        model.compile(optimizer=optimizer, loss="mse", jit_compile=xla, auto_scale_loss=False)
        prepare(model)
        for _ in range(2 * (optimizer.gradient_accumulation_steps or 1)):
            model.train_on_batch(x, y)
        return keras.ops.convert_to_numpy(layer.kernel)
