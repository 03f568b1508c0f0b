"""Reading a checkpoint, and noticing that it is damaged, wherever it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from candle_p1.checkpoints.checkpoint import Checkpoint
from candle_p1.checkpoints.manifest import MANIFEST
from candle_p1.errors import CheckpointError

FILES = (MANIFEST, "arrays-0000.safetensors", "ranks.safetensors")


@pytest.fixture
def checkpoint(stored):
    return stored.latest()


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A copy of the checkpoint, to be damaged."""
    return shutil.copytree(checkpoint.directory, tmp_path / "copy")


def rewrite_manifest(directory, change):
    """Changes the manifest as another program would, with the right digest."""
    content = json.loads((directory / MANIFEST).read_text())
    del content["xxh3_128"]
    change(content)
    rest = json.dumps(content, indent=1).removeprefix("{\n") + "\n"
    digest = xxhash.xxh3_128_hexdigest(rest.encode())
    (directory / MANIFEST).write_text(f'{{"xxh3_128": "{digest}",\n{rest}')


def test_arrays_are_read_into_memory_of_the_caller(checkpoint, state):
    for name, array in state.items():
        out = np.ones_like(array)
        assert checkpoint.read(name, out) is out
        np.testing.assert_array_equal(out, array)


def test_arrays_in_one_piece_are_mapped(checkpoint):
    assert not checkpoint.read("weights/kernel").flags.writeable
    assert checkpoint.read("iterations").shape == ()


def mapped(directory):
    return str(directory) in Path("/proc/self/maps").read_text()


def test_files_are_mapped_until_they_are_released(checkpoint, state):
    kernel = checkpoint.read("weights/kernel")
    checkpoint.rank_state(0)
    assert mapped(checkpoint.directory)
    checkpoint.release()
    np.testing.assert_array_equal(kernel, state["weights/kernel"])
    del kernel
    assert not mapped(checkpoint.directory)
    np.testing.assert_array_equal(checkpoint.read("weights/bias"), state["weights/bias"])


def test_memory_of_another_type_or_shape_is_refused(checkpoint):
    with pytest.raises(TypeError):
        checkpoint.read("weights/kernel", np.empty((700, 50), np.float64))
    with pytest.raises(ValueError, match="broadcast"):
        checkpoint.read("weights/kernel", np.empty((700, 49), np.float32))


def assert_noticed(copy, name, damage):
    path = copy / name
    content = path.read_bytes()
    path.write_bytes(damage(content))
    try:
        with pytest.raises(CheckpointError, match=name):
            Checkpoint(copy).verify()
    finally:
        path.write_bytes(content)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_wherever_it_is(copy, name, place, bit):
    def flipped(content):
        i = int(place * len(content))
        return content[:i] + bytes([content[i] ^ 1 << bit]) + content[i + 1 :]

    assert_noticed(copy, name, flipped)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_noticed(copy, name, place):
    assert_noticed(copy, name, lambda content: content[: int(place * len(content))])


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        Checkpoint(copy).verify()


@pytest.mark.parametrize("content", ["", "no JSON", "[]", "{}", "[" * 100_000])
def test_a_manifest_that_is_something_else_is_damaged(copy, content):
    (copy / MANIFEST).write_text(content)
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoint(copy)


def test_another_version_of_the_format_is_named(copy):
    rewrite_manifest(copy, lambda content: content.update(version=7))
    with pytest.raises(CheckpointError, match="version 7"):
        Checkpoint(copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [("position", {"epoch": -1, "step": 0}), ("number", "x"), ("files", {"../x": {}}), ("more", 1)],
)
def test_a_manifest_with_wrong_values_is_damaged(copy, key, value):
    rewrite_manifest(copy, lambda content: content.update({key: value}))
    with pytest.raises(CheckpointError, match=f"damaged: {key}"):
        Checkpoint(copy)


def test_a_manifest_that_lacks_rows_is_damaged(copy):
    def change(content):
        content["arrays"]["weights/kernel"]["pieces"].clear()

    rewrite_manifest(copy, change)
    with pytest.raises(CheckpointError, match="lacks rows"):
        Checkpoint(copy).verify()


def test_a_manifest_that_names_other_arrays_is_damaged(copy):
    def change(content):
        content["arrays"]["weights/kernel"]["pieces"][0]["key"] = "nothing"

    rewrite_manifest(copy, change)
    with pytest.raises(CheckpointError, match="nothing"):
        Checkpoint(copy).verify()


def test_the_type_that_the_manifest_states_is_checked(copy):
    def change(content):
        content["arrays"]["weights/kernel"]["dtype"] = "int32"

    rewrite_manifest(copy, change)
    with pytest.raises(CheckpointError, match="weights/kernel"):
        Checkpoint(copy).verify()
