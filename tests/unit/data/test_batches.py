import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.data.samples import Samples, Several
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.scaling import ScalingPlan

module = pytest.importorskip("candle_p1.data.batches", reason="no Keras backend is installed")


def plan_for(num_ranks, num_samples, batch_size, level, **options):
    options |= {"num_ranks": num_ranks, "epochs": num_ranks, "batch_size": batch_size}
    options |= {"num_samples": num_samples, "data_parallel": level, "learning_rate": 0.1}
    return ScalingPlan.make(**options)


def train_batches(x, y, batch_size=10):
    plan = plan_for(1, len(x), batch_size, "epoch")
    return module.TrainBatches(Samples(x, y), plan, seed=3, rank=0, shuffle=True)


@pytest.fixture(params=[0, 100, 1 << 20])
def fast(request, monkeypatch):
    """What makes batches for fit, with groups of a batch, of a few and of all."""
    fast = pytest.importorskip("candle_p1.models.fast.batches")
    monkeypatch.setattr(fast, "GROUP_BYTES", request.param)
    return fast


def same_batches(batches, expected):
    for batch, other in zip(batches, expected, strict=True):
        flat, flat_other = map(module.keras.tree.flatten, (batch, other))
        for array, other_array in zip(flat, flat_other, strict=True):
            np.testing.assert_array_equal(array, other_array)


@given(st.integers(1, 6), st.integers(6, 200), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_shards_are_disjoint_and_all_ranks_take_equal_steps(num_ranks, samples, batch, seed):
    plan = plan_for(num_ranks, samples, batch, "batch_step")
    which = {"seed": seed, "epoch": 3}
    orders = [module.epoch_order(plan, samples, rank=rank, **which) for rank in range(num_ranks)]
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
    def order(level, num_samples, epoch):
        plan = plan_for(2, num_samples, 10, level, drop_remainder=True)
        options = {"seed": 1, "rank": 1, "shuffle": False}
        return module.epoch_order(plan, num_samples, epoch=epoch, **options).tolist()

    orders = [order("epoch", 25, epoch) for epoch in range(3)]
    assert [row for each in orders for row in each] == [i % 25 for i in range(60)]
    assert order("batch_step", 51, 1) == [*range(45, 51), *range(25, 39)]


def test_training_batches_are_the_rows_of_the_order():
    batches, plan = train_batches(np.zeros((25, 1)), np.arange(25)), plan_for(1, 25, 10, "epoch")

    def check(batches, epoch):
        seen = [batches[step][1] for step in range(len(batches))]
        assert [len(y) for y in seen] == [10, 10, 5]
        expected = module.epoch_order(plan, 25, seed=3, epoch=epoch, rank=0)
        np.testing.assert_array_equal(np.concatenate(seen), expected)

    check(batches.epoch_batches(5), 5)
    check(batches, 0)  # which asking for others leaves as they are
    batches.set_epoch(5)
    check(batches, 5)


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


class Lists:
    """Rows whose batches are lists, as some authors write them."""

    def __init__(self, *rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows[0])

    def __getitem__(self, which):
        return [rows[which] for rows in self.rows]


NUMBERS, PAIRS = np.arange(10, dtype="f4"), np.arange(20).reshape(10, 2)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (np.arange(30, dtype="f4").reshape(10, 3), np.eye(10, dtype="f4")),
        (Lists(NUMBERS, PAIRS), Several({"a": PAIRS, "b": NUMBERS})),
    ],
)
def test_fit_gets_the_batches_of_each_epoch(fast, x, y):
    train = train_batches(x, y, 4)
    taken = fast.for_fit(train)
    if module.keras.backend.backend() != "tensorflow":
        assert taken is train
        return
    assert not taken.options().autotune.enabled  # its thread would delay the end of an epoch
    assert len(taken) == len(train) == 3
    for epoch in range(3):
        train.set_epoch(epoch)
        same_batches(taken, (train[step] for step in range(3)))
    assert all(isinstance(targets, dict) == isinstance(y, Several) for _, targets in taken)


@pytest.mark.parametrize("first_step", [0, 2])
def test_the_batches_of_several_epochs_are_one_stream(fast, first_step):
    train = train_batches(PAIRS, NUMBERS, 4)
    stream = fast.stream(train, range(2, 5), first_step)
    train.set_epoch(7)  # is no business of batches that are made ahead
    epochs = [train.epoch_batches(epoch) for epoch in (2, 3, 4)]
    expected = [epoch[step] for epoch in epochs for step in range(3)]
    same_batches(stream, expected[first_step:])
    same_batches([train.epoch_batches(2, first_step)[0]], [expected[first_step]])
