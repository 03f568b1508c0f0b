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

ROUNDING = 1e-6
ACTIVE_VARIANCE = 0.01


def save_latent_space(
    directory: Path,
    latent: NDArray[Any],
    classes: NDArray[np.int64],
    types: Sequence[str],
    *,
    title: str,
    use_tsne: bool,
    seed: int,
    variational: bool,
) -> None:
    """Writes ``latent.npz`` and ``latent.png``, coloured by cancer type.

    The picture warns if dimensions have collapsed: see `collapsed_dimensions`.

    Args:
        directory: Where to write them.
        latent: Shape (cases, latent dimensions).
        classes: Index into `types`, shape (cases,).
        types: The cancer types.
        title: The title of the plot.
        use_tsne: Whether to embed by t-SNE. Otherwise more than two dimensions are reduced to the
            first two principal components.
        seed: The seed of t-SNE.
        variational: Whether the points are means of distributions.
    """
    content = io.BytesIO()
    np.savez_compressed(content, latent=latent, cancer_type=np.array(types)[classes])
    write_atomically(directory / "latent.npz", content.getvalue())
    collapsed = collapsed_dimensions(latent, variational)
    points, axes = _to_plane(latent, use_tsne, seed, len(collapsed) == latent.shape[1])
    scatter_by_class(
        directory / "latent.png",
        points,
        classes,
        types,
        title=title,
        axes=axes,
        warning=_describe(collapsed, latent.shape[1]),
    )


def collapsed_dimensions(latent: NDArray[Any], variational: bool) -> list[int]:
    """Returns the dimensions, from 1, that do not distinguish the cases.

    They are constant except for rounding or, in a variational model, their mean varies by less than
    the threshold of Burda, Grosse and Salakhutdinov (arXiv:1509.00519) for an active unit.
    """
    values = latent.astype(np.float64)
    least = np.sqrt(ACTIVE_VARIANCE) if variational else ROUNDING * np.abs(values).max(axis=0)
    return [int(i) + 1 for i in np.flatnonzero(values.std(axis=0) <= least)]


def _describe(collapsed: Sequence[int], num_dimensions: int) -> str:
    if not collapsed:
        return ""
    if len(collapsed) == num_dimensions:
        return "The latent space has collapsed: it does not distinguish the cases."
    if len(collapsed) == 1:
        return f"Latent dimension {collapsed[0]} has collapsed: it does not distinguish the cases."
    names = ", ".join(map(str, collapsed))
    return f"Latent dimensions {names} have collapsed: they do not distinguish the cases."


def _to_plane(
    latent: NDArray[Any], use_tsne: bool, seed: int, constant: bool
) -> tuple[NDArray[Any], tuple[str, str]]:
    num_cases, num_dimensions = latent.shape
    if constant and num_dimensions > 1:  # there is nothing to embed
        return latent[:, :2], ("latent 1", "latent 2")
    if use_tsne and num_cases > 1 and num_dimensions > 1:
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
