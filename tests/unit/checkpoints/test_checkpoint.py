"""Noticing that a checkpoint is damaged, wherever it is."""

import json
import shutil

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from candle_p1.checkpoints.checkpoint import Checkpoint
from candle_p1.checkpoints.manifest import MANIFEST, OtherVersionError
from candle_p1.errors import CheckpointError

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


@pytest.mark.parametrize("content", ["no JSON", "[]", "{}", "[" * 100_000])
def test_a_manifest_that_is_something_else_is_damaged(copy, content):
    (copy / MANIFEST).write_text(content)
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoint(copy)


def test_another_version_of_the_format_is_refused_and_not_taken_for_damage(stored):
    rewrite_manifest(stored.directory / "latest", version=1)
    for read in (stored.newest, lambda: stored.newest_good(pytest.fail)):
        with pytest.raises(OtherVersionError, match="version 1"):
            read()


@pytest.mark.parametrize(
    "change", [{"position": {"epoch": -1, "step": 0}}, {"files": {"../x": {}}}, {"more": 1}]
)
def test_a_manifest_with_wrong_values_is_damaged(copy, change):
    rewrite_manifest(copy, **change)
    with pytest.raises(CheckpointError, match=f"damaged: {next(iter(change))}"):
        Checkpoint(copy)
