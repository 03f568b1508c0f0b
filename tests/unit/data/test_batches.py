from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.data.samples import Samples, Several
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.scaling import ScalingPlan

module = pytest.importorskip("candle_p1.data.batches", reason="no Keras backend is installed")


def plan_for(num_ranks, num_samples, batch_size, level, **options):
    return ScalingPlan.make(
        num_ranks=num_ranks,
        epochs=num_ranks,
        batch_size=batch_size,
        learning_rate=0.1,
        num_samples=num_samples,
        data_parallel=level,
        **options,
    )


@given(st.integers(1, 6), st.integers(6, 200), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_shards_are_disjoint_and_all_ranks_take_equal_steps(num_ranks, samples, batch, seed):
    plan = plan_for(num_ranks, samples, batch, "batch_step")
    orders = [
        module.epoch_order(plan, samples, seed=seed, epoch=3, rank=rank)
        for rank in range(num_ranks)
    ]
    together = np.concatenate(orders)
    assert len(np.unique(together)) == len(together) == num_ranks * (samples // num_ranks)
    assert {len(order) for order in orders} == {plan.samples_per_epoch}


def test_at_the_epoch_level_each_rank_takes_all_samples_in_its_own_order():
    plan = plan_for(2, 100, 10, "epoch")

    def order(seed=1, epoch=0, rank=0, **options):
        return module.epoch_order(plan, 100, seed=seed, epoch=epoch, rank=rank, **options)

    assert sorted(order()) == list(range(100))
    assert order().tolist() == order().tolist()
    others = [order(seed=2), order(epoch=1), order(rank=1)]
    assert all(other.tolist() != order().tolist() for other in others)
    assert order(shuffle=False).tolist() == list(range(100))


def test_unshuffled_epochs_of_whole_batches_pass_through_the_samples_in_turn():
    plan = plan_for(2, 25, 10, "epoch", whole_batches=True)
    orders = [
        module.epoch_order(plan, 25, seed=1, epoch=epoch, rank=1, shuffle=False)
        for epoch in range(3)
    ]
    assert np.concatenate(orders).tolist() == [i % 25 for i in range(60)]
    shard = plan_for(2, 51, 10, "batch_step", whole_batches=True)
    order = module.epoch_order(shard, 51, seed=1, epoch=1, rank=1, shuffle=False)
    assert order.tolist() == [*range(45, 51), *range(25, 39)]


def test_training_batches_are_the_rows_of_the_order():
    x = np.arange(25, dtype=np.float32).reshape(25, 1)
    plan = plan_for(1, 25, 10, "epoch")
    batches = module.TrainBatches(Samples(x, x[:, 0]), plan, seed=1, rank=0, shuffle=True)
    for epoch in (0, 5):
        batches.set_epoch(epoch)
        order = module.epoch_order(plan, 25, seed=1, epoch=epoch, rank=0)
        seen = [batches[step] for step in range(len(batches))]
        assert [len(y) for _, y in seen] == [10, 10, 5]
        np.testing.assert_array_equal(np.concatenate([y for _, y in seen]), order)


class Rank(SerialCommunicator):
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@given(st.integers(1, 6), st.integers(0, 40), st.integers(1, 9), st.integers(0, 4))
def test_evaluation_shares_cover_every_sample_once(num_ranks, num_samples, batch, max_steps):
    y = np.arange(num_samples)
    seen = []
    for rank in range(num_ranks):
        share = module.EvaluationBatches(Samples(y, y), batch, Rank(rank, num_ranks), max_steps)
        seen += [value for step in range(len(share)) for value in share[step][1]]
    assert seen == list(range(min(num_samples, max_steps * batch) if max_steps else num_samples))


@pytest.mark.parametrize("group_bytes", [0, 100, 1 << 20])
def test_fit_gets_the_batches_of_each_epoch(monkeypatch, group_bytes):
    made = pytest.importorskip("candle_p1.models.fast.batches")
    monkeypatch.setattr(made, "GROUP_BYTES", group_bytes)
    for_fit = made.for_fit
    samples = Samples(np.arange(30, dtype="float32").reshape(10, 3), np.eye(10, dtype="float32"))
    plan = plan_for(1, 10, 4, "epoch")
    train = module.TrainBatches(samples, plan, seed=3, rank=0, shuffle=True)
    taken = for_fit(train)
    if module.keras.backend.backend() != "tensorflow":
        assert taken is train
        return
    assert not taken.options().autotune.enabled  # its thread would delay the end of an epoch
    assert len(taken) == len(train) == 3
    for epoch in range(3):
        train.set_epoch(epoch)
        for step, batch in enumerate(taken):
            for one, other in zip(batch, train[step], strict=True):
                np.testing.assert_array_equal(one, other)
        assert step == 2


class ModelStandIn:
    """Remembers what it is told to fit."""

    def fit(self, x, **options):
        self.x, self.options = x, options


@pytest.mark.parametrize("group_bytes", [0, 100, 1 << 20])
@pytest.mark.parametrize("first_step", [0, 2])
def test_the_batches_of_several_epochs_are_one_stream(monkeypatch, group_bytes, first_step):
    made = pytest.importorskip("candle_p1.models.fast.batches")
    monkeypatch.setattr(made, "GROUP_BYTES", group_bytes)
    samples = Samples(np.arange(30, dtype="float32").reshape(10, 3), np.eye(10, dtype="float32"))
    plan = plan_for(1, 10, 4, "epoch")
    train = module.TrainBatches(samples, plan, seed=3, rank=0, shuffle=True)
    train.first_step = first_step
    model = ModelStandIn()
    made.fit(model, train, range(2, 5), verbose=0)
    assert model.options["initial_epoch"] == 2
    assert model.options["epochs"] == 5
    assert model.options["verbose"] == 0
    if module.keras.backend.backend() != "tensorflow":
        assert model.x is train
        return
    assert model.options["steps_per_epoch"] == 3 - first_step
    assert int(model.x.cardinality()) < 0  # Keras would otherwise begin anew after each epoch
    assert not model.x.options().autotune.enabled
    train.set_epoch(7)  # is no business of batches that are made ahead
    batches = list(model.x)
    expected = [of[step] for of in map(train.of_epoch, range(2, 5)) for step in range(len(of))]
    assert len(batches) == len(expected) == 3 * (3 - first_step)
    for batch, other in zip(batches, expected, strict=True):
        for one, another in zip(batch, other, strict=True):
            np.testing.assert_array_equal(one, another)


def test_the_batches_of_an_epoch_leave_others_as_they_are():
    x = np.arange(25, dtype=np.float32).reshape(25, 1)
    plan = plan_for(1, 25, 10, "epoch")
    batches = module.TrainBatches(Samples(x, x[:, 0]), plan, seed=1, rank=0, shuffle=True)
    before = batches[0][1].tolist()
    of_later = batches.of_epoch(5)
    assert batches[0][1].tolist() == before
    batches.set_epoch(5)
    assert batches[0][1].tolist() == of_later[0][1].tolist() != before


class Lists:
    """Rows whose batches are lists, as some authors write them."""

    def __init__(self, *rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows[0])

    def __getitem__(self, which):
        return [rows[which] for rows in self.rows]


@pytest.mark.parametrize("group_bytes", [0, 1 << 20])
def test_fit_gets_several_inputs_and_outputs(monkeypatch, group_bytes):
    made = pytest.importorskip("candle_p1.models.fast.batches")
    monkeypatch.setattr(made, "GROUP_BYTES", group_bytes)
    numbers, words = np.arange(10, dtype="f4"), np.arange(20).reshape(10, 2)
    samples = Samples(Lists(numbers, words), Several({"a": words, "b": numbers}))
    plan = plan_for(1, 10, 4, "epoch")
    train = module.TrainBatches(samples, plan, seed=3, rank=0, shuffle=False)
    taken = made.for_fit(train)
    if module.keras.backend.backend() != "tensorflow":
        return
    for step, ((number, word), targets) in enumerate(taken):
        rows = slice(4 * step, 4 * step + 4)
        np.testing.assert_array_equal(number, numbers[rows])
        np.testing.assert_array_equal(word, words[rows])
        np.testing.assert_array_equal(targets["a"], words[rows])
        np.testing.assert_array_equal(targets["b"], numbers[rows])
    assert step == 2
