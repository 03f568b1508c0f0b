"""Noticing damage wherever it is, which checkpoint a run goes on from, and which are kept."""

import json
import os
import shutil
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from candle_p1.checkpoints.checkpoint import Checkpoint, CheckpointRoot
from candle_p1.checkpoints.manifest import MANIFEST, OtherVersionError
from candle_p1.checkpoints.policy import keep_policy
from candle_p1.errors import CheckpointError
from candle_p1.records.types import Position
from tests.unit.checkpoints.conftest import latest
from tests.unit.checkpoints.conftest import named as epoch

FILES = (MANIFEST, "arrays-0000.safetensors", "ranks.safetensors")


@pytest.fixture
def copy(stored, tmp_path):
    """A copy of a checkpoint, to be damaged."""
    return shutil.copytree(stored.directory / "latest", tmp_path / "copy")


def rewrite_manifest(directory, **changes):
    """Changes the manifest as another program would, with the right digest."""
    content = json.loads((directory / MANIFEST).read_text()) | changes
    del content["xxh3_128"]
    rest = json.dumps(content, indent=1).removeprefix("{\n") + "\n"
    digest = xxhash.xxh3_128_hexdigest(rest.encode())
    (directory / MANIFEST).write_text(f'{{"xxh3_128": "{digest}",\n{rest}')


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(FILES),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.none() | st.integers(0, 7),
)
def test_a_flipped_bit_and_a_truncated_file_are_noticed_wherever_that_is(copy, name, place, bit):
    path = copy / name
    content = path.read_bytes()
    i = int(place * len(content))
    rest = b"" if bit is None else bytes([content[i] ^ 1 << bit]) + content[i + 1 :]
    path.write_bytes(content[:i] + rest)
    try:
        with pytest.raises(CheckpointError, match=name):
            Checkpoint(copy).verify()
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        Checkpoint(copy).verify()


WRONG = [{"position": {"epoch": -1, "step": 0}}, {"files": {"../x": {}}}, {"more": 1}]


@pytest.mark.parametrize("change", ["no JSON", "[]", "{}", "[" * 100_000, *WRONG])
def test_a_manifest_that_is_something_else_or_has_wrong_values_is_damaged(copy, change):
    if isinstance(change, dict):
        rewrite_manifest(copy, **change)
    else:
        (copy / MANIFEST).write_text(change)
    place = f": {next(iter(change))}" if isinstance(change, dict) else ""
    with pytest.raises(CheckpointError, match=f"damaged{place}"):
        Checkpoint(copy)


def test_another_version_of_the_format_is_refused_and_not_taken_for_damage(stored):
    rewrite_manifest(stored.directory / "latest", version=1)
    for read in (stored.newest, lambda: stored.newest_good(pytest.fail)):
        with pytest.raises(OtherVersionError, match="version 1"):
            read()


ARRAYS = "arrays-0000.safetensors"


def damage(path):
    path.write_bytes(path.read_bytes()[:-1])


def link(root, name, target):
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(target)


def test_something_else_in_place_of_the_directory_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"):
        CheckpointRoot(tmp_path / "file").newest_good(pytest.fail)


@pytest.mark.parametrize(
    ("harm", "harmed", "number", "named"),
    [
        (damage, [f"{epoch(3)}/{ARRAYS}"], 2, [f"{epoch(3)}/{ARRAYS}"]),
        (damage, [f"{epoch(i)}/{ARRAYS}" for i in (1, 2, 3)], None, [epoch(3), epoch(2), epoch(1)]),
        (os.remove, [f"{epoch(3)}/{MANIFEST}"], 2, [MANIFEST]),
        (os.remove, ["latest"], 3, []),
        (shutil.rmtree, [epoch(3)], 2, [epoch(3)]),
        (shutil.rmtree, [""], None, []),
    ],
)
def test_what_is_damaged_is_named_and_the_one_before_is_taken(
    stored, said, harm, harmed, number, named
):
    for name in harmed:
        harm(stored.directory / name)
    found = stored.newest_good(said.append)
    assert (found and found.position) == (number and Position(number, 0))
    assert len(said) == len(named)
    assert all(name in sentence for name, sentence in zip(named, said, strict=True))


def test_what_a_user_has_gone_back_from_is_not_taken(stored, said, make_writer, save):
    """The link leads to epoch 1; of the run that goes on from there, only its own are taken."""
    link(stored.directory, "latest", epoch(1))
    writer = make_writer(after=stored.newest_good(pytest.fail))
    assert save(writer, 2)
    writer.close()
    damage(stored.directory / f"{epoch(2)}-2" / ARRAYS)
    assert stored.newest_good(said.append).position == Position(1, 0)


def test_the_link_may_lead_elsewhere(stored, tmp_path):
    elsewhere = shutil.copytree(stored.directory / epoch(1), tmp_path / "elsewhere")
    link(stored.directory, "latest", elsewhere)
    assert stored.newest_good(pytest.fail).directory == elsewhere


@pytest.mark.parametrize("is_harmed", [False, True])
def test_a_continued_run_goes_on_counting_and_removes_those_of_its_first_part(
    stored, make_writer, save, is_harmed
):
    if is_harmed:
        damage(stored.directory / epoch(1) / MANIFEST)
        shutil.rmtree(stored.directory / epoch(2))
    assert save(make_writer(keep=keep_policy("linear", 2), after=latest(stored.directory)), 4)
    manifest = latest(stored.directory).manifest
    earlier = [3, 1] if is_harmed else [3, 2, 1]
    assert (manifest.number, [each.number for each in manifest.earlier]) == (4, earlier)
    assert stored.names() == [epoch(3), epoch(4)]


@pytest.mark.parametrize("is_continued", [False, True])
def test_the_best_is_linked_and_kept_even_if_the_link_leads_elsewhere(
    make_writer, save, root, is_continued
):
    writer = make_writer(keep=keep_policy("linear", 1))
    for number in range(1, 5):
        assert save(writer, number, best=number < 3)
    assert (root / "best").readlink() == Path(epoch(2)), "also if the directory is moved"
    link(root, "best", epoch(4))
    if is_continued:
        writer = make_writer(keep=keep_policy("linear", 1), after=latest(root))
    assert save(writer, 5)
    assert CheckpointRoot(root).names() == [epoch(2), epoch(5)]


def test_only_the_checkpoints_of_the_run_are_removed(stored, make_writer, save):
    writer = make_writer(keep=keep_policy("linear", 1))
    assert save(writer, 1)
    assert save(writer, 2)
    assert stored.names() == [epoch(1), epoch(2), f"{epoch(2)}-2", epoch(3)]


def test_another_run_may_take_a_name_that_has_become_free(make_writer, save, root):
    stored, keep = CheckpointRoot(root), keep_policy("linear", 2)
    first, second = make_writer(keep=keep), make_writer(keep=keep)
    for number in (1, 2, 3):  # the first one is removed
        assert save(first, number)
    assert save(second, 1)
    assert save(first, 4)
    assert stored.names() == [epoch(1), epoch(3), epoch(4)]
    first.close()
    assert save(second, 2)  # the manifest of epoch 4 names it among those before
    continued = make_writer(keep=keep, after=Checkpoint(root / epoch(4)))
    assert save(continued, 5)
    assert stored.names() == [epoch(1), epoch(2), epoch(4), epoch(5)]


def test_the_latest_is_kept_whatever_is_asked(make_writer, save, root):
    writer = make_writer(keep=lambda numbers: set())
    assert save(writer, 1)
    assert save(writer, 2)
    assert CheckpointRoot(root).names() == [epoch(2)]
