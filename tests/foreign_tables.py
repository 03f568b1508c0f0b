"""Tables of sixty samples in the forms that people and programs give them."""

import io

import h5py
import numpy as np
import pandas as pd
import pytest

NUM, GENES = 60, [f"ENSG{number:011d}" for number in range(20)]
IDS = [f"TCGA-{number:02d}" for number in range(NUM)]
KINDS = ["tumor, primary", "normal"] * (NUM // 2)
PATIENTS = [f"P{number // 3}" for number in range(NUM)]
VALUES = np.random.default_rng(0).lognormal(sigma=0.4, size=(NUM, len(GENES)))
VALUES[::2, ::2] *= 4  # of tumors
VALUES = VALUES.astype(np.float32).round(3)
VERSIONED = [f"{gene}.{number % 7 + 1}" for number, gene in enumerate(GENES)]
FRAME = pd.DataFrame(VALUES, IDS, VERSIONED)
LABELLED = FRAME.assign(kind=KINDS)
CLINICAL = pd.DataFrame({"sample": IDS, "age": 50, "kind": KINDS, "patient": PATIENTS})
ACROSS = FRAME.T.rename_axis("gene_id")
HEADERS = FRAME.set_axis(
    pd.MultiIndex.from_arrays([[*range(20)], [f"SYMBOL{i}" for i in range(20)], VERSIONED]), axis=1
)


def geo(path):
    text = io.StringIO()
    ACROSS.rename_axis("ID_REF").to_csv(text, sep="\t", quoting=1)
    head = '!Series_title\t"none"\n\n!series_matrix_table_begin\n'
    path.write_text(f"{head}{text.getvalue()}!series_matrix_table_end\n")


def gct(path):
    ACROSS.reset_index().assign(Description="a gene").to_csv(path, sep="\t", index=False)
    path.write_text(f"#1.2\n{len(GENES)}\t{NUM}\n{path.read_text()}")


def excel(path):
    LABELLED.to_csv(path, sep=";", decimal=",", encoding="utf-8-sig", lineterminator="\r\n")


def anndata(path):
    """Writes what anndata 0.12 does for a sparse matrix and a column of categories."""
    text, filled = h5py.string_dtype(), np.nonzero(VALUES)
    with h5py.File(path, "w") as file:
        for name, names in {"obs": IDS, "var": VERSIONED}.items():
            group = file.create_group(name)
            group.attrs.update({"_index": "_index", "column-order": ["kind"][: name == "obs"]})
            group.create_dataset("_index", data=names, dtype=text)
        kinds = file["obs"].create_group("kind")
        kinds.create_dataset("categories", data=sorted(set(KINDS)), dtype=text)
        kinds["codes"] = np.array([sorted(set(KINDS)).index(kind) for kind in KINDS], np.int8)
        matrix = file.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "shape": VALUES.shape})
        matrix["data"], matrix["indices"] = VALUES[filled], filled[1]
        matrix["indptr"] = np.r_[0, np.cumsum((VALUES != 0).sum(axis=1))]


def hdf5(path):
    pytest.importorskip("tables", reason="PyTables, for pandas' HDF5, is not installed")
    LABELLED.to_hdf(path, key="all")


def marked(path):
    """Writes a byte-order mark, which is no part of the first column's name."""
    LABELLED.to_csv(path, encoding="utf-8-sig", index_label="sample")


IN_TABLE = {"label": "kind"}
BESIDE = {"label": "kind", "labels": "clinical.tsv"}
ACROSS_BESIDE = BESIDE | {"transpose": True}
FORMS = {
    "default.csv": (LABELLED.to_csv, IN_TABLE),
    "unnamed.csv": (lambda path: LABELLED.to_csv(path, index=False), IN_TABLE),
    "excel.csv": (excel, IN_TABLE),
    "packed.csv.gz": (LABELLED.to_csv, IN_TABLE),
    "marked.csv": (marked, IN_TABLE | {"id_column": "sample"}),
    "marked.csv.gz": (marked, IN_TABLE | {"id_column": "sample"}),
    "marked.csv.xz": (marked, IN_TABLE | {"id_column": "sample"}),
    "packed.csv.bz2": (LABELLED.to_csv, IN_TABLE),
    "packed.csv.xz": (LABELLED.to_csv, IN_TABLE),
    "frame.parquet": (LABELLED.to_parquet, IN_TABLE),
    "frame.feather": (lambda path: LABELLED.reset_index().to_feather(path), IN_TABLE),
    "frame.h5": (hdf5, IN_TABLE),
    "single.h5ad": (anndata, IN_TABLE),
    "across.tsv": (lambda path: ACROSS.to_csv(path, sep="\t"), ACROSS_BESIDE),
    "geo_series_matrix.txt": (geo, ACROSS_BESIDE),
    "expression.gct": (gct, BESIDE),
    "headers.tsv": (
        lambda path: HEADERS.to_csv(path, sep="\t"),
        BESIDE | {"header_rows": 3, "name_row": 3},
    ),
}


DRUGS = [str(700 + number) for number in range(10)]
RESPONSES = pd.DataFrame(
    [
        (drug, f"NCI.{line}", dose, 20.0 * number - 60 - 10 * dose)
        for number, drug in enumerate(DRUGS)
        for line in range(8)
        for dose in (-6.0, -4.5)
    ],
    columns=["NSC", "CELLNAME", "LOG_CONCENTRATION", "GROWTH"],
)
LINES = pd.DataFrame(VALUES[:8], [f"NCI:{line}" for line in range(8)], VERSIONED)
DESCRIPTORS = pd.DataFrame(
    np.linspace([0] * 5, range(1, 6), 10).round(3), DRUGS, list("abcde")
).rename_axis("drug")


def write_features(directory, lines=LINES, drugs=DESCRIPTORS):
    """Writes tables of features; returns their paths by role."""
    paths = {role: directory / f"{role}.tsv" for role in ("expression", "descriptors")}
    for path, table in zip(paths.values(), (lines, drugs), strict=True):
        table.to_csv(path, sep="\t")
    return paths
