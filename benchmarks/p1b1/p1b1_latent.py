"""The latent space of P1B1's test cases, as numbers and as a plot."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.figures import scatter_by_class
from candle_p1.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray


def save_latent_space(
    directory: Path,
    latent: NDArray[Any],
    classes: NDArray[np.int64],
    types: Sequence[str],
    *,
    title: str,
    use_tsne: bool,
    seed: int,
) -> None:
    """Writes ``latent.npz`` and ``latent.png``, coloured by cancer type.

    Args:
        directory: Where to write them.
        latent: Shape (cases, latent dimensions).
        classes: Index into `types`, shape (cases,).
        types: The cancer types.
        title: The title of the plot.
        use_tsne: Whether to embed by t-SNE. Otherwise more than two dimensions are reduced to the
            first two principal components.
        seed: The seed of t-SNE.
    """
    content = io.BytesIO()
    np.savez_compressed(content, latent=latent, cancer_type=np.array(types)[classes])
    write_atomically(directory / "latent.npz", content.getvalue())
    points, axes = _to_plane(latent, use_tsne, seed)
    scatter_by_class(
        directory / "latent.png",
        points,
        classes,
        types,
        title=title,
        axes=axes,
    )


def _to_plane(
    latent: NDArray[Any], use_tsne: bool, seed: int
) -> tuple[NDArray[Any], tuple[str, str]]:
    num_cases, num_dimensions = latent.shape
    if use_tsne and num_cases > 1:
        from sklearn.manifold import TSNE

        perplexity = min(30.0, (num_cases - 1) / 3)
        embedding = TSNE(n_components=2, random_state=seed, perplexity=perplexity)
        return embedding.fit_transform(latent), ("t-SNE 1", "t-SNE 2")
    if num_dimensions > 2:
        from sklearn.decomposition import PCA

        analysis = PCA(n_components=2)
        points = analysis.fit_transform(latent)
        shares = analysis.explained_variance_ratio_
        return points, (f"component 1 ({shares[0]:.0%})", f"component 2 ({shares[1]:.0%})")
    if num_dimensions == 1:
        return np.hstack([latent, np.zeros_like(latent)]), ("latent 1", "")
    return latent, ("latent 1", "latent 2")
