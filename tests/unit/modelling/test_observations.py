"""How the shape of a run follows from the number of ranks, and from a record."""

import pytest

from candle_p1.modelling.laws import COMPUTE, EXPOSED, LOAD, PHASES, STARTUP, VALIDATE, WAIT
from candle_p1.modelling.observations import ShapeRule, observe
from candle_p1.scaling import ScalingPlan
from tests.modelled_runs import shape_of
from tests.planted_records import changed, planted_record


def record(num_ranks=2, **kwargs):
    return planted_record("nt3", num_ranks, epochs=48, load_s=[4.0, 6.0][:num_ranks], **kwargs)


def test_the_phases_of_a_run_add_up_to_its_time():
    found = observe(record(wait_s=1.5, communication_s=3.0, epoch_s=2.0))
    assert set(found.phases_s) == set(PHASES)
    assert sum(found.phases_s.values()) == pytest.approx(found.total_s)
    # Loading is the mean over ranks. Computing is 24 epochs of 2 s and the first step of 0.5 s,
    # without 3 s of communication; the first step exceeds the others by 0.3 s.
    expected = {STARTUP: 3.0, LOAD: 5.0, WAIT: 1.5, EXPOSED: 3.0, COMPUTE: 24 * 2 + 0.5 - 3 - 0.3}
    assert {name: found.phases_s[name] for name in expected} == pytest.approx(expected)
    alone = observe(record(1, wait_s=1.0))
    assert alone.phases_s[WAIT] == alone.phases_s[EXPOSED] == 0
    assert sum(alone.phases_s.values()) == pytest.approx(alone.total_s)


def test_exposed_communication_and_validation_are_those_of_the_epochs():
    epochs = record().model_dump(exclude_unset=True)["training"]["epochs"]
    for epoch in epochs:
        epoch["exposed_communication"] = epoch["train"] | {"mean_s": 0.125}
        epoch["validation"] = epoch["train"] | {"mean_s": 0.25}
    found = observe(changed(record(communication_s=9.0), {"training.epochs": epochs}))
    assert found.phases_s[EXPOSED] == pytest.approx(24 * 0.125)
    assert found.phases_s[VALIDATE] == pytest.approx(24 * 0.25)


@pytest.mark.parametrize(
    ("scaling", "counts", "epochs"),
    [("strong", (1, 2, 5, 16, 48), (48, 24, 10, 3, 1)), ("weak", (1, 5, 48), (48, 48, 48))],
)
def test_epochs_are_shared_as_in_the_plan(scaling, counts, epochs):
    rule = ShapeRule.of([record(epochs_scaling=scaling)])
    assert tuple(rule.at(num).epochs for num in counts) == epochs
    assert rule.is_strong == (scaling == "strong")
    cannot = [5] if rule.is_strong else []
    assert [num for num in counts if not rule.can_run(num)] == cannot


@pytest.mark.parametrize("max_steps", [0, 10])
@pytest.mark.parametrize("batch_scaling", ["none", "sqrt", "linear"])
@pytest.mark.parametrize("data_parallel", ["epoch", "batch_step"])
def test_other_numbers_of_ranks_have_the_steps_of_their_own_plans(
    data_parallel, batch_scaling, max_steps
):
    facts = {"epochs": 48, "batch_size": 20, "learning_rate": 0.001, "num_samples": 1117}
    facts |= {"data_parallel": data_parallel, "batch_scaling": batch_scaling}
    plans = {
        num: ScalingPlan.make(num_ranks=num, max_steps=max_steps, **facts) for num in (1, 2, 4, 8)
    }
    changes = {f"plan.{name}": value for name, value in plans[2].model_dump().items()}
    changes["data.num_train"] = 1117
    changes["parameters.train_steps"] = {"value": max_steps, "origin": "default"}
    rule = ShapeRule.of([changed(record(), changes)])
    for num_ranks, plan in plans.items():
        found = rule.at(num_ranks)
        planned = (plan.epochs_per_rank, plan.steps_per_epoch, plan.batch_size)
        assert (found.epochs, found.steps_per_epoch, found.batch_size) == planned


@pytest.mark.parametrize(
    ("threads", "expected_threads", "expected_nodes"),
    [((4, 2), [4, 2, 1, 1], [1, 1, 1, 2]), ((2, 2), [2, 2, 2, 2], [1, 1, 2, 4])],
)
def test_ranks_that_share_a_node_share_its_cores(threads, expected_threads, expected_nodes):
    cores = {"environment": {"node_cores": 4}}
    records = [record(num, threads=threads[num - 1], **cores) for num in (1, 2)]
    shapes = [ShapeRule.of(records).at(num) for num in (1, 2, 4, 8)]
    assert [shape.threads for shape in shapes] == expected_threads
    assert [shape.num_nodes for shape in shapes] == expected_nodes
    assert not any(shape.is_crowded for shape in shapes)
    assert ShapeRule.of(records, ranks_per_node=2).at(8).num_nodes == 4


def test_cores_are_crowded_or_busy_with_other_ranks_and_read_together():
    assert shape_of(4, threads=2, cores_per_node=7).is_crowded
    assert not shape_of(4, threads=2, cores_per_node=8).is_crowded
    on_gpus = ShapeRule.of([record(device="NVIDIA V100")]).at(64)
    assert (on_gpus.num_nodes, on_gpus.is_crowded) == (1, False)
    for num_ranks, threads, expected in ((1, 1, 0), (2, 1, 1), (3, 2, 4), (1, 4, 0)):
        assert shape_of(num_ranks, threads=threads).busy_neighbours == expected
    assert shape_of(8, load_threads=4).readers_on_node == 32
    assert shape_of(8, load_threads=4, cores_per_node=16).readers_on_node == 16
