import sys

import numpy as np
import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.data.reader import FileSet, Reader
from candle_p1.errors import DataError

CANDLE_COLUMNS = "gdc\tensembl\tsymbol\tentrez\tname\n"


@pytest.fixture
def load(small_data):
    """Loads and prepares P1B1's small data with the landmark genes of a file."""
    p1b1 = find_benchmark("p1b1")
    directory = small_data("p1b1")
    roles = p1b1.recipe.roles

    def load(landmarks=None):
        params = p1b1.bind(p1b1.initialize_parameters(argv=["--use_landmark_genes", "True"]))
        paths = {role: directory / name for role, name in roles.items()}
        reader = Reader(FileSet.at(paths | ({"landmarks": landmarks} if landmarks else {})))
        return p1b1.preprocess(p1b1.load_data(reader, params), params), paths

    return load


def test_the_landmark_genes_of_a_file_like_candles_are_used(load, tmp_path):
    """Its other columns are text, and some of it is missing."""
    own, paths = load()
    assert own.train.x_shape == (20,)
    genes = paths["train"].read_text().split("\n", 1)[0].split(",")[2:5]
    rows = [f"{gene}\tE{i}\tS{i}\t\tname, 5'-{i}\n" for i, gene in enumerate(genes)]
    rows.append("ENSG0.1\tE\tS\t1\tnot in the tables\n")
    file = tmp_path / "lincs1000.tsv"
    file.write_text(CANDLE_COLUMNS + "".join(rows))
    data, _ = load(file)
    assert data.train.x_shape == (3,)


@pytest.mark.parametrize(
    "content",
    [b"", b"symbol\tname\nA\tB\n", CANDLE_COLUMNS.encode(), b"gdc\n\xff\n", b"gdc\tgdc\nA\tB\n"],
)
def test_a_file_without_landmark_genes_is_refused(load, tmp_path, content):
    file = tmp_path / "lincs1000.tsv"
    file.write_bytes(content)
    with pytest.raises(DataError):
        load(file)


SPREAD = np.random.default_rng(0).normal(size=200)


@pytest.mark.parametrize(
    ("columns", "variational", "collapsed", "use_tsne"),
    [
        ((SPREAD, SPREAD), False, [], False),
        ((SPREAD, 0 * SPREAD), False, [2], False),
        ((0 * SPREAD, 0 * SPREAD), False, [1, 2], True),
        ((3 + 1e-8 * SPREAD,), False, [1], True),
        ((1e-3 * SPREAD, 1e-3 * SPREAD), False, [], False),
        ((SPREAD, 0.05 * SPREAD, SPREAD), True, [2], False),
        ((0 * SPREAD, 0 * SPREAD, 0 * SPREAD), True, [1, 2, 3], True),
    ],
)
def test_the_picture_warns_of_a_collapsed_latent_space(
    monkeypatch, tmp_path, columns, variational, collapsed, use_tsne
):
    find_benchmark("p1b1")
    module = sys.modules["p1b1_latent"]
    latent = np.stack(columns, axis=1).astype(np.float32)
    assert module.collapsed_dimensions(latent, variational) == collapsed
    drawn = {}
    scatter = module.scatter_by_class

    def record(*args, **kwargs):
        drawn.update(kwargs)
        scatter(*args, **kwargs)

    monkeypatch.setattr(module, "scatter_by_class", record)
    options = {"title": "latent", "use_tsne": use_tsne, "seed": 1, "variational": variational}
    module.save_latent_space(tmp_path, latent, np.arange(200) % 3, ["A", "B", "C"], **options)
    assert (tmp_path / "latent.png").read_bytes().startswith(b"\x89PNG")
    assert bool(drawn["warning"]) == bool(collapsed)
    if len(collapsed) < len(columns):
        assert all(str(number) in drawn["warning"] for number in collapsed)


@pytest.mark.extended
@pytest.mark.parametrize("model", ["ae", "vae", "cvae"])
@pytest.mark.parametrize(
    "flags", ["--dense 8", "--dense 6 4 --residual True --batch_normalization True --dropout 0.1"]
)
def test_the_encoder_and_the_decoder_together_are_the_autoencoder(model, flags):
    keras = pytest.importorskip("keras", reason="no Keras backend is installed")
    p1b1 = find_benchmark("p1b1")
    import p1b1_model

    flags += f" --model {model} --latent_dim 4 --out_activation linear"
    params = p1b1.read_parameters(flags.split())
    whole = p1b1_model.build_autoencoder(params, 12, 3)
    random = np.random.default_rng(5)
    whole.set_weights([random.uniform(0.1, 1, each.shape) for each in whole.weights])
    profile = random.normal(size=(7, 12)).astype("float32")
    types = [np.eye(3, dtype="float32")[[0, 1, 2, 0, 1, 2, 0]]] if model == "cvae" else []
    for _ in range(2):  # making them leaves the model as it was
        encoder, decoder = (
            p1b1_model.encoder_of(params, whole),
            p1b1_model.decoder_of(params, whole),
        )
        compressed = encoder.predict_on_batch([profile, *types] if types else profile)
        found = decoder.predict_on_batch([compressed, *types] if types else compressed)
    expected = whole.predict_on_batch([profile, *types] if types else profile)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len(np.unique(found.round(2), axis=0)) > 2
    keras.backend.clear_session()
