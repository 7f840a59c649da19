"""Balanced parts of a data set: as many records of each cluster as can be had.

Clusters are found by k-means; these are clustered by their centres, and so on up to the top.

Source: Vo et al. 2024 (arXiv:2405.15613), section 3, without its resampling of the centres.
Axes: N records, D features, K clusters of a level.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
from sklearn.cluster import KMeans, MiniBatchKMeans

from vit_jax.base.errors import InputError
from vit_jax.curation.features import Features
from vit_jax.data.subset import rank_in_class

_DRAWN = 256  # records for each cluster of the first level, from which its centres are learned
_BATCH, _EPOCHS = 4096, 20


def find_clusters(
    features: Features, numbers: Sequence[int], seed: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Cluster records into numbers[0] clusters, these into numbers[1], and so on.

    Returns:
      label_N: the first cluster of each record, int32; -1 for one without features.
      parents: for each further level, the cluster of each cluster of the level below it.

    Raises: InputError if there are fewer records than clusters.
    """
    rng = np.random.default_rng(seed)
    drawn = np.zeros(len(features), bool)
    drawn[rng.choice(len(features), min(_DRAWN * numbers[0], len(features)), replace=False)] = True
    x_MD = np.concatenate([x_ND[drawn[ids]] for ids, x_ND in features.read()])
    if len(x_MD) < numbers[0]:
        raise InputError(f"--clusters={numbers[0]}: there are only {len(x_MD)} records to cluster")
    # Unlike k-means on all records at once, batches give the same centres on any number of threads.
    # Centres of few records stay, because rare kinds balance a part.
    model = MiniBatchKMeans(
        numbers[0], batch_size=_BATCH, max_iter=_EPOCHS, max_no_improvement=None,
        reassignment_ratio=0, n_init=1, random_state=seed,
    ).fit(x_MD)  # fmt: skip
    label_N = np.full(len(features), -1, np.int32)
    for ids, x_ND in features.read():
        if len(ids):
            label_N[ids] = model.predict(x_ND)
    centres_KD, parents = model.cluster_centers_, list[np.ndarray]()
    for number in numbers[1:]:
        above = KMeans(number, n_init=1, random_state=seed).fit(centres_KD)
        parents.append(above.labels_)
        centres_KD = above.cluster_centers_
    return label_N, parents


def sample_balanced(
    label_N: np.ndarray, parents: Sequence[np.ndarray], keep: int, seed: int
) -> np.ndarray:
    """The sorted ids of `keep` records: equally many of each top cluster, as far as it has so many.

    The number of a cluster is split in the same way over the clusters below it. Records of a
    cluster of the first level are drawn.

    Args:
      label_N, parents: as `find_clusters` returns them.

    Raises: InputError if there are fewer records.
    """
    rng = np.random.default_rng(seed)
    known = np.flatnonzero(label_N >= 0)
    if keep > len(known):
        raise InputError(f"--keep={keep}: there are only {len(known)} records with features")
    sizes = [np.bincount(label_N[known], minlength=max(map(len, parents), default=0))]
    for parent_K, above in itertools.zip_longest(parents, parents[1:], fillvalue=()):
        sizes.append(np.bincount(parent_K, sizes[-1], len(above)).astype(np.int64))
    shares = split_evenly(sizes.pop(), keep, rng)
    for parent_K, size_K in zip(reversed(parents), reversed(sizes), strict=True):
        below = np.zeros(len(parent_K), np.int64)
        for cluster, share in enumerate(shares):
            children = np.flatnonzero(parent_K == cluster)
            below[children] = split_evenly(size_K[children], share, rng)
        shares = below
    drawn = rng.permutation(known)
    label_N = label_N[drawn]
    return np.sort(drawn[rank_in_class(label_N) < shares[label_N]])


def split_evenly(sizes: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Parts of `total`, at most as large as `sizes` (K,) and otherwise equal: int64 (K,).

    They are min(size, level), with the greatest level that does not exceed `total`; of what is
    left, clusters that are drawn get 1 more each.
    """

    def filled(level: int) -> int:
        return int(np.minimum(sizes, level).sum())

    level = bisect.bisect_right(range(int(sizes.max(initial=0)) + 1), total, key=filled) - 1
    parts = np.minimum(sizes, level)
    more = rng.choice(np.flatnonzero(sizes > level), total - filled(level), replace=False)
    parts[more] += 1
    return parts
