"""Evaluating a trained network on labelled samples: metrics with intervals, curves and pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from candle_p1 import figures
from candle_p1.data.directory import imported_facts
from candle_p1.data.samples import join_batches
from candle_p1.errors import DataError, ParameterError
from candle_p1.files import content_sha256, write_atomically
from candle_p1.inference.metrics import (
    CONFIDENCE,
    ClassMetrics,
    RegressionMetrics,
    bootstrap,
    number_units,
    summarize,
)
from candle_p1.inference.tables import NewSamples, predict
from candle_p1.inference.trained import TrainedRun
from candle_p1.models.saving import FINAL_NAME
from candle_p1.models.scores import as_probabilities, last_activation
from candle_p1.records.environment import package_versions
from candle_p1.records.record import finite

if TYPE_CHECKING:
    from rich.table import Table

EVALUATION_NAME = "evaluation.json"
VERSION = 1
"""Of the format of evaluation.json."""
MAX_POINTS = 500
"""The most points of a curve in evaluation.json."""
MAX_UNKNOWN = 20


@dataclass(frozen=True)
class Bootstrap:
    """How the intervals are drawn.

    Attributes:
        num_draws: How often the samples are drawn.
        seed: Of the draws.
        group: The column whose values, such as patients, are drawn as a whole; None: each sample.
    """

    num_draws: int = 1000
    seed: int = 0
    group: str | None = None


class Evaluator:
    """Evaluates a run on the samples of a table, and writes ``evaluation.json`` and pictures.

    docs/predictions.md describes the file.

    Args:
        trained: The run.
        samples: The samples; their classes are needed, except by an autoencoder.
        directory: Where to write.
        options: How the intervals are drawn.
    """

    def __init__(
        self, trained: TrainedRun, samples: NewSamples, directory: Path, options: Bootstrap
    ) -> None:
        self._trained, self._samples, self._options = trained, samples, options
        self._directory = directory
        data = trained.record.data
        self._is_synthetic = bool(data and data.synthetic)
        self._digest = content_sha256(samples.path)
        self._group = options.group
        files = data.files if data and data.files else {}
        self._same = [role for role, file in files.items() if file.sha256 == self._digest]
        self._import: dict[str, Any] = {}
        for file in [file for role, file in files.items() if role != "test"][:1]:
            path = Path(file.path)
            facts = imported_facts(path.parent) or {}
            made = facts.get("files", {}).get(path.name, {}).get("sha256")
            self._import = facts if made and file.sha256 in (None, made) else {}

    @property
    def warnings(self) -> list[str]:
        """What the reader must know to judge the results."""
        # The first of an import's sources is the table that it made the training files of.
        source: dict[str, Any] = next(iter(self._import.get("sources", {}).values()), {})
        trained_on = {*self._import.get("samples", {}).get("train", ())}
        ids = [
            name
            for block in (self._samples.blocks() if trained_on else ())
            for name in block.columns.get("sample", ())
        ]
        if num := sum(name in trained_on for name in ids):
            text = f"{num:,} of {len(ids):,} samples were trained on"
        elif {*self._same} - {"test"} or source.get("sha256") == self._digest:
            text = "the network was trained on samples of this file"
        else:
            return []
        return [f"{text}: new ones will do worse"]

    def evaluate(self) -> dict[str, Any]:
        """Returns the content of ``evaluation.json``, after writing it and the pictures.

        Raises:
            DataError: The table has no labels, or some that the network does not know.
            ParameterError: What the network returns cannot be measured.
            OSError: The directory cannot be written to.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        importable = self._trained.benchmark.importable
        has_classes = importable is not None and importable.needs_labels
        found = self._classes() if has_classes else self._values()
        trained, options = self._trained, self._options
        content = {
            "version": VERSION,
            "benchmark": trained.benchmark.name,
            "weights": str(trained.weights),
            "synthetic": self._is_synthetic,
            "data": {
                "path": str(self._samples.path.absolute()),
                "bytes": self._samples.path.stat().st_size,
                "sha256": self._digest,
                "same_as": self._same,
                "num_samples": found.pop("num_samples"),
                "num_units": found.pop("num_units"),
            },
            "bootstrap": {
                "num_draws": options.num_draws,
                "seed": options.seed,
                "confidence": CONFIDENCE,
                "group": self._group,
            },
            **found,
            "versions": package_versions(),
        }
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        write_atomically(self._directory / EVALUATION_NAME, text)
        return content

    def _classes(self) -> dict[str, Any]:
        labels: list[str] = []
        groups: list[str] = []
        blocks = []
        for block, outputs in predict(self._trained, self._samples):
            if block.labels is None:
                problem = "it has no classes to compare with: pass --label COLUMN"
                raise DataError(problem, self._samples.path)
            labels += block.labels
            groups += block.groups or ()
            blocks.append(outputs)
        outputs = join_batches(blocks)
        probabilities = as_probabilities(outputs, last_activation(self._trained.model))
        names = self._trained.inputs.classes or [str(i) for i in range(outputs.shape[1])]
        true = self._numbered(labels, names)
        of_classes = ClassMetrics(true, outputs, probabilities)
        units = number_units(groups or self._imported_groups(), len(true))
        ones = np.ones((1, len(true)))
        values, options = of_classes(ones), self._options
        draws = bootstrap(units, of_classes, options.num_draws, options.seed)
        counts = of_classes.confusion(ones)
        counts.sums = counts.sums[0].astype(np.int64)
        constant = self._constant(len(names))
        naive = {} if constant is None else counts.of_constant(int(constant.argmax())).result()
        by_chance = of_classes.ece_if_calibrated(options.num_draws, options.seed)
        metrics = self._metrics(
            {name: value for name, value in values.items() if value.ndim == 1}, draws, naive
        )
        metrics["ece"]["if_calibrated"] = float(by_chance.mean())
        rows = []
        for i, name in enumerate(names):
            of_class = {
                key.removeprefix("class_"): value[:, i]
                for key, value in values.items()
                if value.ndim == 2
            }
            drawn = {key: draws[f"class_{key}"][:, i] for key in of_class}
            numbers = {
                "num_samples": int(counts.sums[i].sum()),
                "num_predicted": int(counts.sums[:, i].sum()),
            }
            rows.append({"name": name} | numbers | summarize(of_class, drawn))
        found = {
            "num_samples": len(true),
            "num_units": int(units.max()) + 1,
            "metrics": metrics,
            "classes": rows,
            "confusion": counts.sums.tolist(),
            "curves": self._curves(of_classes, rows),
            "reliability": of_classes.reliability(),
        }
        figures.confusion_matrix(
            self._directory / "confusion.png",
            counts.sums,
            names,
            title=self._title("Samples by true and predicted class"),
        )
        figures.reliability(
            self._directory / "reliability.png",
            found["reliability"],
            title=self._title("Reliability of the probabilities"),
        )
        return found

    def _imported_groups(self) -> list[str] | None:
        """Returns what the samples of a file made by `data import --group` belong to."""
        path = self._samples.path
        facts = imported_facts(path.parent) or {}
        made = facts.get("files", {}).get(path.name, {})
        if "groups" not in facts or made.get("sha256") != self._digest:
            return None
        roles = dict(zip(facts["files"], ("train", "test"), strict=True))
        self._group = facts["options"]["group"]
        return facts["groups"][roles[path.name]]  # type: ignore[no-any-return]

    def _numbered(self, labels: Sequence[str], names: Sequence[str]) -> NDArray[np.int64]:
        """Returns the number of each label's class.

        Raises:
            DataError: The network does not know some.
        """
        place = {name: i for i, name in enumerate(names)}
        if unknown := sorted(set(labels).difference(place)):
            shown = ", ".join(map(repr, unknown[:MAX_UNKNOWN])) + ", …" * (
                len(unknown) > MAX_UNKNOWN
            )
            known = ", ".join(map(repr, names[:MAX_UNKNOWN])) + ", …" * (len(names) > MAX_UNKNOWN)
            raise DataError(
                f"the network was not trained on the classes {shown}: rename them or leave their"
                f" samples out; it knows {known}",
                self._samples.path,
            )
        return np.array([place[label] for label in labels])

    def _curves(
        self, of_classes: ClassMetrics, rows: Sequence[Mapping[str, Any]]
    ) -> dict[str, dict[str, list[float]]]:
        """Draws the curves of the classes that occur, and returns their points, thinned."""
        roc, recalled, points = {}, {}, {}
        for row, ranking in zip(rows, of_classes.rankings, strict=True):
            if row["auroc"]["value"] is None:
                continue
            found = ranking.points()
            kept = np.unique(np.linspace(0, len(found.recall) - 1, MAX_POINTS).round().astype(int))
            points[row["name"]] = {
                name: values[kept].tolist() for name, values in found._asdict().items()
            }
            label = f"{row['name']} ({row['auroc']['value']:.3f})"
            roc[label] = np.r_[0, found.false_positive_rate], np.r_[0, found.recall]
            label = f"{row['name']} ({row['average_precision']['value']:.3f})"
            recalled[label] = found.recall, found.precision
        figures.class_curves(
            self._directory / "roc.png",
            roc,
            title=self._title("ROC curves"),
            axes=("false positive rate", "true positive rate"),
            number="area under it",
            reference="chance",
        )
        figures.class_curves(
            self._directory / "precision_recall.png",
            recalled,
            title=self._title("Precision and recall"),
            axes=("recall", "precision"),
            number="average precision",
        )
        return points

    def _values(self) -> dict[str, Any]:
        """Returns what is known of a regression or, without a target, of an autoencoder."""
        trained, options = self._trained, self._options
        inputs, target = trained.inputs, trained.inputs.target
        groups: list[str] = []
        num_samples = 0
        for block in self._samples.blocks():
            groups += block.groups or ()
            if target and block.y is None:
                problem = f"it has no column {self._column(target.name)} to compare with"
                raise DataError(problem, self._samples.path)
            if target and not (is_there := np.isfinite(block.y)).all():
                row = num_samples + int(is_there.reshape(len(block), -1).all(axis=1).argmin()) + 1
                problem = f"row {row:,} of the data has no {self._column(target.name)}"
                raise DataError(f"{problem}: leave the row out", self._samples.path)
            num_samples += len(block)
        units = number_units(groups or self._imported_groups(), num_samples)
        num_outputs = 1 if target else len(inputs.offset)
        cutoffs = trained.params.get("category_cutoffs") if target else None
        regression = RegressionMetrics(units, num_outputs, cutoffs, options.seed)
        pairs = []
        for block, outputs in predict(trained, self._samples):
            if (shape := getattr(outputs, "shape", None)) != (len(block), num_outputs):
                raise ParameterError(
                    f"the network returns {shape or 'several arrays'} for {len(block)} samples, but"
                    " evaluate measures classes, one target (Inputs.target) or restored features"
                )
            # An autoencoder restores profiles; a conditioned one also takes classes.
            profiles = block.x[0] if isinstance(block.x, tuple) else block.x
            true = np.reshape(block.y if target else profiles, outputs.shape)
            regression.update(true, outputs)
            pairs += [np.hstack([true, outputs])] if target else []
        naive = {}
        if (constant := self._constant(num_outputs)) is not None:
            naive = regression.score.of_constant(constant).result()
        draws = regression.draws(options.num_draws, options.seed)
        found = {
            "num_samples": num_samples,
            "num_units": int(units.max()) + 1,
            "metrics": self._metrics(regression.values(), draws, naive),
        }
        if target:
            measured, predicted = np.concatenate(pairs).T.astype(np.float64) * target.factor
            draw = figures.measured_against_predicted, figures.error_histogram
            for name, figure in zip(("predictions", "errors"), draw, strict=True):
                figure(
                    self._directory / f"{name}.png",
                    measured,
                    predicted,
                    title=self._title(f"{target.name.capitalize()} of samples"),
                    unit=f"{target.unit} {target.name}",
                )
            return found
        errors = np.concatenate(regression.errors)
        figures.histogram(
            self._directory / "reconstruction_error.png",
            errors,
            title=self._title("Reconstruction error of samples"),
            axis="mean squared error of scaled features",
        )
        quantiles = np.quantile(errors, [0.05, 0.5, 0.95]).tolist()
        names = ("p05", "median", "p95")
        return found | {"reconstruction_error": dict(zip(names, quantiles, strict=True))}

    def _constant(self, num_outputs: int) -> NDArray[np.float64] | None:
        """Returns what the naive predictor does; None if targets were no values of outputs."""
        mean = self._trained.inputs.mean_target
        return mean if mean is not None and mean.size == num_outputs else None

    def _column(self, name: str) -> str:
        """Returns what the column of a target is called in the benchmark's files."""
        importable = self._trained.benchmark.importable
        quantities = importable.quantities if importable else ()
        return next((each for each in quantities if each.lower() == name), name)

    def _metrics(
        self,
        values: Mapping[str, NDArray[np.float64]],
        draws: Mapping[str, NDArray[np.float64]],
        naive: Mapping[str, float],
    ) -> dict[str, dict[str, float | None]]:
        """Returns metrics with intervals, the naive predictor's, and what the record says.

        The record says it of its test file and its final model only.
        """
        found = summarize(values, draws)
        for name, value in naive.items():
            found[name]["naive"] = finite(value)
        quality = self._trained.record.quality or {}
        if "test" in self._same and self._trained.weights.name == FINAL_NAME:
            for name in quality.keys() & found.keys():
                found[name]["recorded"] = quality[name].value
        return found

    def _title(self, text: str) -> str:
        return f"{text} (synthetic data)" if self._is_synthetic else text


def tables(content: Mapping[str, Any]) -> Iterator[Table]:
    """Yields the tables for the screen: of all metrics, and of those of classes."""
    from rich.table import Table

    metrics = content["metrics"]
    further = {
        key: heading
        for key, heading in (("naive", "naive predictor"), ("recorded", "in the record"))
        if any(key in each for each in metrics.values())
    }
    table = Table("metric")
    for heading in ("value", f"{content['bootstrap']['confidence']:.0%} interval"):
        table.add_column(heading, justify="right")
    for heading in further.values():
        table.add_column(heading, justify="right")
    for name, each in metrics.items():
        ends = "-" if each["low"] is None else f"{each['low']:.4f} to {each['high']:.4f}"
        table.add_row(
            name, _shown(each["value"]), ends, *(_shown(each.get(key)) for key in further)
        )
    yield table
    if "classes" not in content:
        return
    names = ("precision", "recall", "f1", "auroc", "average_precision")
    table = Table("class")
    for heading in ("samples", *names):
        table.add_column(heading.replace("_", " "), justify="right")
    for row in content["classes"]:
        cells = (_shown(row[name]["value"]) for name in names)
        table.add_row(row["name"], f"{row['num_samples']:,}", *cells)
    yield table


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
