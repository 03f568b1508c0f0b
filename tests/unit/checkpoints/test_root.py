"""Which checkpoint a run goes on from, and which are kept."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from candle_p1.checkpoints.manifest import MANIFEST, Position
from candle_p1.checkpoints.policy import keep_policy
from candle_p1.checkpoints.root import CheckpointRoot
from candle_p1.errors import CheckpointError


def names(paths):
    return [path.name for path in paths]


def epoch(number):
    return Position(number, 0).name


def damage(path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff" if path.read_bytes()[-1:] != b"\xff" else b"\0")


def link(root, name, target):
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(target)


def test_there_is_none_in_a_directory_that_does_not_exist(tmp_path):
    root = CheckpointRoot(tmp_path / "nowhere")
    assert root.names() == []
    assert root.latest() is None
    assert root.newest_good(pytest.fail) is None


def test_something_else_in_place_of_the_directory_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"):
        CheckpointRoot(tmp_path / "file").newest_good(pytest.fail)


def test_the_latest_comes_first_then_those_before_it(stored):
    assert stored.names() == [epoch(1), epoch(2), epoch(3)]
    assert stored.linked("latest") == epoch(3)
    assert names(stored.candidates()) == [epoch(3), epoch(2), epoch(1)]
    assert stored.newest_good(pytest.fail).position == Position(3, 0)


def test_links_are_relative_so_that_the_directory_can_be_moved(stored, tmp_path):
    moved = CheckpointRoot(stored.directory.rename(tmp_path / "moved"))
    assert moved.newest_good(pytest.fail).directory == tmp_path / "moved" / epoch(3)


def test_a_damaged_one_is_named_and_the_one_before_is_taken(stored, said):
    damage(stored.directory / epoch(3) / "arrays-0000.safetensors")
    assert stored.newest_good(said.append).position == Position(2, 0)
    assert len(said) == 1
    assert f"{epoch(3)}/arrays-0000.safetensors" in said[0]


def test_without_its_manifest_the_newest_other_one_is_taken(stored, said):
    (stored.directory / epoch(3) / MANIFEST).unlink()
    assert stored.newest_good(said.append).position == Position(2, 0)
    assert MANIFEST in said[0]


def test_without_the_link_the_newest_one_is_taken(stored, said):
    (stored.directory / "latest").unlink()
    assert stored.newest_good(said.append).position == Position(3, 0)
    assert said == []


def test_a_link_to_what_was_removed_is_named(stored, said):
    shutil.rmtree(stored.directory / epoch(3))
    assert stored.newest_good(said.append).position == Position(2, 0)
    assert epoch(3) in said[0]


def test_nothing_is_taken_if_all_are_damaged(stored, said):
    for path in stored.candidates():
        damage(path / "arrays-0000.safetensors")
    assert stored.newest_good(said.append) is None
    assert len(said) == 3


def test_what_a_user_has_gone_back_from_is_not_taken(stored, said, make_writer, save):
    """The link leads to epoch 1; of the run that goes on from there, only its own are taken."""
    link(stored.directory, "latest", epoch(1))
    writer = make_writer(after=stored.newest_good(pytest.fail))
    assert save(writer, 2)
    writer.close()
    damage(stored.directory / f"{epoch(2)}-2" / "arrays-0000.safetensors")
    assert stored.newest_good(said.append).position == Position(1, 0)


def test_the_link_may_lead_elsewhere(stored, tmp_path):
    elsewhere = shutil.copytree(stored.directory / epoch(1), tmp_path / "elsewhere")
    link(stored.directory, "latest", elsewhere)
    assert stored.newest_good(pytest.fail).directory == elsewhere
    assert stored.linked("latest") is None


def test_a_name_that_is_taken_gets_a_number(make_writer, save, root):
    writer = make_writer()
    for _ in range(3):
        assert save(writer, 1)
    assert CheckpointRoot(root).names() == [epoch(1), f"{epoch(1)}-2", f"{epoch(1)}-3"]
    assert CheckpointRoot(root).linked("latest") == f"{epoch(1)}-3"


def test_checkpoints_have_numbers_that_go_on_after_a_restart(stored, make_writer, save):
    writer = make_writer(after=stored.latest())
    assert save(writer, 4)
    latest = stored.latest()
    assert latest.manifest.number == 4
    assert [each.number for each in latest.manifest.before] == [3, 2, 1]


def test_the_best_is_linked_and_kept(make_writer, save, root):
    writer = make_writer(keep=keep_policy("linear", 1))
    for number in range(1, 6):
        assert save(writer, number, best=number == 2)
    writer.close()
    stored = CheckpointRoot(root)
    assert stored.names() == [epoch(2), epoch(5)]
    assert stored.linked("best") == epoch(2)


def test_only_the_checkpoints_of_the_run_are_removed(stored, make_writer, save):
    writer = make_writer(keep=keep_policy("linear", 1))
    assert save(writer, 1)
    assert save(writer, 2)
    writer.close()
    assert stored.names() == [epoch(1), epoch(2), f"{epoch(2)}-2", epoch(3)]


def test_a_continued_run_removes_those_of_its_first_part(stored, make_writer, save):
    writer = make_writer(keep=keep_policy("linear", 2), after=stored.latest())
    assert save(writer, 4)
    writer.close()
    assert stored.names() == [epoch(3), epoch(4)]


def test_the_latest_is_kept_whatever_is_asked(make_writer, save, root):
    writer = make_writer(keep=lambda stored: set())
    for number in (1, 2):
        assert save(writer, number)
    writer.close()
    assert CheckpointRoot(root).names() == [epoch(2)]


def test_facts_are_those_of_the_moment_and_may_hold_lost_losses(make_writer, save, root, state):
    writer = make_writer()
    history = {"loss": [1.0, float("nan"), float("inf")]}
    writer.save(Position(1, 0), {}, {}, history, wait=True)
    history["loss"].clear()
    loss = CheckpointRoot(root).latest().facts["loss"]
    assert loss[0] == 1.0
    assert loss[1] != loss[1]
    assert loss[2] == float("inf")


def test_facts_that_are_not_json_are_refused_before_anything_is_written(make_writer, root):
    with pytest.raises(TypeError):
        make_writer().save(Position(1, 0), {}, {}, {"x": object()})
    assert CheckpointRoot(root).names() == []


def test_the_first_line_of_the_manifest_is_json_too(stored):
    content = json.loads((stored.directory / "latest" / MANIFEST).read_text())
    assert content["format"] == "candle-p1 checkpoint"
    assert content["files"].keys() == {"arrays-0000.safetensors", "ranks.safetensors"}
