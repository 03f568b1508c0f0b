"""Which data files a run reads: those that are named, those of a directory, or synthetic ones.

The names in the benchmark's own parameter files are CANDLE's, even if a driver repeats them, and do
not refer to files on this machine: unless other names or a directory are given, the data are
synthetic. So they are, with a warning, if a config file has those names, as CANDLE's files do, and
none of these files exists. A relative name is looked up in data_dir if that is set, then in
the working directory, then in $CANDLE_DATA_DIR.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from candle_p1.data.directory import IMPORT_NAME, data_directory, imported_facts
from candle_p1.data.source import check_regular
from candle_p1.errors import DataError, ParameterError, SetupError
from candle_p1.parameters.parameter import Origin
from candle_p1.parameters.parameter_set import ParameterSet, Settings


def import_of(benchmark: Any, params: ParameterSet) -> tuple[dict[str, Any] | None, Path]:
    """Returns the description of imported files, None if they are others; and where it would be.

    `benchmark` is a `candle_p1.benchmark.Benchmark`.

    Raises:
        DataError: It cannot be read.
    """
    is_importable = "train" in benchmark.files and benchmark.importable
    if not is_importable or not (path := params[benchmark.files["train"]]):
        return None, Path(IMPORT_NAME)
    facts, where = imported_facts(Path(path).parent), Path(path).parent / IMPORT_NAME
    return (facts if facts and facts["benchmark"] == benchmark.name else None), where


class NamedFiles:
    """The data files of a run of a `candle_p1.benchmark.Benchmark` with some parameters."""

    def __init__(self, benchmark: Any, params: ParameterSet) -> None:
        self._benchmark, self._params = benchmark, params
        self._directory = params["data_dir"]

    def settings(self) -> tuple[Settings, list[str]]:
        """Returns the path of each file, None if it is not read, with its origin; and warnings.

        Raises:
            DataError: A named file does not exist.
            ParameterError: Some files are named and others are not.
        """
        benchmark, params, directory = self._benchmark, self._params, self._directory
        needed = [benchmark.files[role] for role in benchmark.needed_files(params)]
        named = {
            name: (params[name], params.origin(name))
            for name in needed
            if params[name] and (self._is_changed(name) or self._is_named(name))
        }
        warnings = []
        if benchmark.recipe and named and all(map(self._is_candles, named)):
            found = [name for name in needed if params[name] and self._existing(params[name])]
            if not found and not directory:
                origin = replace(next(iter(named.values()))[1], line=None)
                none = "there are no such files, so the data are synthetic"
                warnings.append(f"{', '.join(named)} ({origin}): {none}")
            named = {name: (params[name], params.origin(name)) for name in found}
        missing = [name for name in needed if name not in named]
        if directory:
            origin, parent = params.derived_origin("data_dir"), Path(directory).expanduser()
            own = benchmark.own_parameters
            named |= {name: (str(parent / own[name]), origin) for name in missing}
        elif missing and (named or benchmark.recipe is None):
            raise ParameterError(
                f"{benchmark.name} also needs {', '.join(missing)}: name all files, or their"
                " directory with --data_dir"
            )
        unread = {
            name: (None, Origin("synthetic data" if name in needed else "not read"))
            for name in benchmark.files.values()
        }
        read = {name: (str(self.find(path)), origin) for name, (path, origin) in named.items()}
        idle = [name for name in ("size", "data_seed") if named and params.origin(name).is_explicit]
        idle += [n for n in unread if n not in needed and self._is_named(n)]
        warnings += [
            f"{name} = {params[name]} ({params.origin(name)}) has no effect: this run reads"
            f" {', '.join(read) or 'synthetic data'}"
            for name in idle
        ]
        return unread | read, warnings

    def settings_of_import(self) -> Settings:
        """Returns the parameters that follow from imported files.

        Raises:
            DataError: Their description cannot be read.
            ParameterError: Another value was given.
        """
        params = self._params
        facts, where = import_of(self._benchmark, params)
        if facts is None:
            return {}
        for name, value in facts["parameters"].items():
            if self._is_named(name) and params[name] != value:
                raise ParameterError(
                    f"{name} = {params[name]} ({params.origin(name)}), but {where} says {value}:"
                    " omit it"
                )
        derived = dict(facts["parameters"])
        if params["folds"] and params["group_data"] is None and facts.get("groups"):
            derived["group_data"] = str(where)
        origin = Origin("imported data", str(where))
        return {name: (value, origin) for name, value in derived.items()}

    def find(self, name: str) -> Path:
        """Returns the path of the file with a name.

        Raises:
            DataError: There is none, or it is not a regular file.
        """
        if path := self._existing(name):
            if not path.is_dir():  # of the files of a role
                check_regular(path)
            return path
        places = " or ".join(str(path).removesuffix(name) for path in self._candidates(name))
        argument = self._benchmark.argument
        raise DataError(
            f"no such file{places and f' in {places}'}. Download it with"
            f" candle-p1 data fetch {argument}, or generate synthetic data of the published"
            f" shape with candle-p1 data make {argument} --size full --out DIR",
            name,
        )

    def _is_candles(self, name: str) -> bool:
        """Returns whether a config file gives a data file the name that CANDLE gives it."""
        return self._params.origin(name).kind == "config file" and not self._is_changed(name)

    def _is_named(self, name: str) -> bool:
        """Returns whether a flag, or a config file other than the benchmark's, sets a value."""
        origin, benchmark = self._params.origin(name), self._benchmark
        path = Path(origin.file or "").resolve()
        own = path.parent == benchmark.folder and path.match(f"{benchmark.name}_*_model.txt")
        return origin.is_explicit and not own

    def _is_changed(self, name: str) -> bool:
        """Returns whether a value differs from the benchmark's own file, or from the default.

        Its origin does not tell, because a run's ``final_params.txt`` and a driver's copy of the
        parameters repeat every value.
        """
        return bool(self._params[name] != self._benchmark.own_parameters[name])

    def _candidates(self, name: str) -> list[Path]:
        paths, bases = [Path(name).expanduser()], [Path.cwd()]
        if self._directory:
            paths.insert(0, Path(self._directory).expanduser() / paths[0])
        with suppress(SetupError):  # no home directory
            bases.append(data_directory() / self._benchmark.name)
        return list(dict.fromkeys(base / path for path in paths for base in bases))

    def _existing(self, name: str) -> Path | None:
        for path in self._candidates(name):
            with suppress(OSError):  # the name is too long
                if path.exists():
                    return path
        return None
