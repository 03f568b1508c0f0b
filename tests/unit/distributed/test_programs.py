import sys
from types import SimpleNamespace

import pytest

from candle_p1.distributed import programs
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.programs import LIMIT_BYTES, Programs, keep_programs, processor
from candle_p1.errors import SetupError


@pytest.fixture
def jax(monkeypatch):
    """A JAX that remembers its settings, and listeners to whom a test tells events."""
    found = SimpleNamespace(settings={}, listeners=[], durations=[])
    found.config = SimpleNamespace(update=found.settings.__setitem__)
    found.monitoring = SimpleNamespace(
        register_event_listener=found.listeners.append,
        register_event_duration_secs_listener=found.durations.append,
    )
    monkeypatch.setitem(sys.modules, "jax", found)
    monkeypatch.delenv(programs.VARIABLE, raising=False)
    return found


def keep(named, default, rank=0, deterministic=False):
    comm = SerialCommunicator()
    comm.rank = rank
    return keep_programs(comm, named, default, deterministic=deterministic)


def test_a_user_and_a_kind_of_processor_have_a_directory(jax, tmp_path, monkeypatch):
    names = []
    for flags in ("sse avx", "sse avx avx512f"):
        cpu = tmp_path / "cpuinfo"
        cpu.write_text(f"processor: 0\nflags: {flags}\nMHz: 1\n\nprocessor: 1\nflags: {flags}\n")
        monkeypatch.setattr(programs, "CPU_FILE", cpu)
        names.append(processor())
        cpu.write_text(cpu.read_text().replace("MHz: 1", "MHz: 2"))
        assert processor() == names[-1]
    assert len(set(names)) == 2
    kept = keep(None, tmp_path / "default")
    assert kept.directory.name.endswith(names[-1])
    assert keep(None, tmp_path / "default", deterministic=True).directory != kept.directory
    keep(None, tmp_path / "default")
    assert jax.settings["jax_compilation_cache_dir"] == str(kept.directory)
    assert jax.settings["jax_compilation_cache_max_size"] == LIMIT_BYTES
    keep(None, tmp_path / "default", rank=3)  # reads without a lock
    assert jax.settings["jax_compilation_cache_max_size"] == -1


def test_what_a_killed_process_was_writing_is_removed(jax, tmp_path):
    directory = keep(str(tmp_path), tmp_path).directory
    for name in ("a-cache", "a-atime", "b-cache"):
        (directory / name).write_bytes(b"12345678")
    keep(str(tmp_path), tmp_path, rank=1)
    assert (directory / "b-cache").exists()
    keep(str(tmp_path), tmp_path)
    assert sorted(path.name for path in directory.glob("*-*")) == ["a-atime", "a-cache"]


def test_a_variable_of_jax_has_precedence_over_the_default_alone(jax, tmp_path, monkeypatch):
    monkeypatch.setenv(programs.VARIABLE, str(tmp_path / "of-jax"))
    assert keep(None, tmp_path / "default").directory == tmp_path / "of-jax"
    assert jax.settings == {}
    assert keep(str(tmp_path / "named"), tmp_path / "default").directory.parent.name == "named"
    assert keep("none", tmp_path / "default").directory is None
    assert jax.settings["jax_enable_compilation_cache"] is False


def test_a_directory_that_cannot_be_made_is_an_error_only_if_it_was_named(jax, tmp_path):
    (tmp_path / "file").touch()
    found = keep(None, tmp_path / "file" / "default")
    assert found.directory is None
    assert "cannot be kept" in found.warning
    assert jax.settings == {"jax_enable_compilation_cache": False}
    with pytest.raises(SetupError, match="--compiled_dir another directory, or none"):
        keep(str(tmp_path / "file"), tmp_path)


def test_events_of_jax_are_counted(jax):
    found = Programs()
    found.count()
    for name in ("cache_hits", "cache_misses", "cache_hits", "tasks_using_cache"):
        jax.listeners[0](f"/jax/compilation_cache/{name}")
    jax.durations[0]("/jax/core/compile/backend_compile_duration", 2.0)
    jax.durations[0]("/jax/core/compile/jaxpr_trace_duration", 9.0)
    counts = {"start": "warm", "num_loaded": 2, "num_kept": 1, "seconds": 2.0}
    assert found.describe() == {"directory": None, **counts}
