"""Programs that JAX has compiled, kept on disk for later runs.

JAX finds a program by its operations, options, devices and own version. A directory is of one user,
because who can write programs can run them, and of one kind of processor, because a program for
another may crash. Only rank 0 writes, under a lock; the other ranks, of which there may be
thousands, read without one. They compile what they cannot read.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import filelock

from candle_p1.distributed.comm import Communicator
from candle_p1.errors import SetupError

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
"""JAX's own: with it, JAX's settings hold."""
NONE = "none"
LIMIT_BYTES = 4 << 30
"""The programs used least recently are removed beyond it."""
LOCK_S = 10.0
CPU_FILE = Path("/proc/cpuinfo")
FEATURES = ("flags", "Features", "model name")
"""What describes a processor in CPU_FILE, on x86 and Arm."""


@dataclass
class Programs:
    """What this rank had to compile; see `candle_p1.records.types.CompiledPrograms`.

    A warning says why no programs are kept although they should be.
    """

    directory: Path | None = None
    num_loaded: int = 0
    num_kept: int = 0
    seconds: float = 0.0
    warning: str = ""

    def describe(self) -> dict[str, Any]:
        """Returns the record's section "programs"."""
        return {
            "directory": str(self.directory) if self.directory else None,
            "start": "warm" if self.num_loaded > self.num_kept else "cold",
            "num_loaded": self.num_loaded,
            "num_kept": self.num_kept,
            "seconds": self.seconds,
        }

    def restart(self) -> None:
        """Counts from zero: a process that trains several times keeps its device."""
        self.num_loaded, self.num_kept, self.seconds = 0, 0, 0.0

    def count(self) -> None:
        """Counts from now on, by JAX's own events."""
        from jax import monitoring

        def event(name: str, **facts: Any) -> None:
            self.num_loaded += name == "/jax/compilation_cache/cache_hits"
            self.num_kept += name == "/jax/compilation_cache/cache_misses"

        def duration(name: str, seconds: float, **facts: Any) -> None:  # of one program
            self.seconds += seconds * (name == "/jax/core/compile/backend_compile_duration")

        monitoring.register_event_listener(event)
        monitoring.register_event_duration_secs_listener(duration)


def keep_programs(
    comm: Communicator, named: str | None, default: Path, *, deterministic: bool
) -> Programs:
    """Makes JAX keep what it compiles, and counts that; before it compiles anything.

    `named` is a directory or NONE; without it, VARIABLE or the default says where. Deterministic
    runs have a directory of their own, because with the programs, XLA keeps which algorithms were
    the fastest on a GPU, and those of other runs need not be deterministic.

    Raises:
        SetupError: The named directory cannot be used.
    """
    import jax

    programs = Programs()
    programs.count()
    if named == NONE:
        jax.config.update("jax_enable_compilation_cache", False)
        return programs
    if named is None and os.environ.get(VARIABLE):
        programs.directory = Path(os.environ[VARIABLE])
        return programs
    kind = "-deterministic" * deterministic
    directory = Path(named or default) / f"{os.getuid()}-{processor()}{kind}"
    try:
        _prepare(directory, writes=comm.rank == 0)
    except (OSError, filelock.Timeout, NotImplementedError) as error:
        why = f"{directory}: compiled programs cannot be kept here: {error}"
        if named:
            raise SetupError(f"{why}. Give --compiled_dir another directory, or {NONE}") from error
        programs.warning = f"{why}; --compiled_dir names another directory, or {NONE}"
        jax.config.update("jax_enable_compilation_cache", False)
        return programs
    programs.directory = directory
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # With a limit, JAX locks the directory for reading, too.
    jax.config.update("jax_compilation_cache_max_size", -1 if comm.rank else LIMIT_BYTES)
    # Ranks that share a GPU are not joined, and JAX takes each for the one that writes. Hundreds of
    # programs compile faster than in 50 ms, and are not kept.
    least_s = inf if comm.rank else 0.05
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least_s)
    return programs


def _prepare(directory: Path, *, writes: bool) -> None:
    """Makes the directory, and removes what a process was writing when it was killed.

    JAX writes a program before the time of its use, both under the lock, and would never replace a
    part of a program.
    """
    directory.mkdir(parents=True, mode=0o700, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError("others than this user own the directory, or can write into it")
    if not writes:
        return
    with filelock.FileLock(directory / ".lockfile", timeout=LOCK_S):
        for program in directory.glob("*-cache"):
            if not program.with_name(program.name.removesuffix("cache") + "atime").exists():
                program.unlink()


def processor() -> str:
    """Returns a short name of this kind of processor and what it can do."""
    lines: list[str] = []
    with suppress(OSError):
        text = CPU_FILE.read_text(encoding="utf-8", errors="replace")
        first = text.strip().partition("\n\n")[0]
        lines = [line for line in first.splitlines() if line.startswith(FEATURES)]
    digest = hashlib.sha256("\n".join([platform.processor(), *lines]).encode()).hexdigest()
    return f"{platform.machine()}-{digest[:12]}"
