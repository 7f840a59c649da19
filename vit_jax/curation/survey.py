"""Show a set of pictures: classes, sizes, colours, duplicates, and what a model finds odd in it."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np
from sklearn.cluster import MiniBatchKMeans
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vit_jax.base.errors import InputError, few
from vit_jax.curation.duplicates import Found, find, near_hashes, sections_of
from vit_jax.curation.formats import Facts
from vit_jax.curation.looks import Looks, look_at, small_pictures
from vit_jax.data.captions import as_bytes
from vit_jax.data.contract import Source, read_labels
from vit_jax.data.order import spread
from vit_jax.insight.pages import Section

_UNEVEN = 10.0  # times as many pictures in the largest class as in the smallest
_STRETCHED = 1.1  # a ratio of sides that a square changes visibly
_MUCH = 0.1  # share of the pixels
_DISTANCE = 31  # bits, of near duplicates
_CLASSES, _EACH, _LISTED = 20, 8, 20  # classes and pictures of the sheet; rows of other tables
_FOLDS = 5  # of the cross-validation
_CLUSTERS = 12


def survey(sources: Mapping[str, Source], keeps_shape: bool) -> list[Section]:
    """Sections about the first of `sources`, the training data.

    Unreadable pictures and duplicates are those of all. `keeps_shape`: whether training keeps the
    pictures in their own shape.
    """
    looks = {name: look_at(source, 0, source.num_examples) for name, source in sources.items()}
    name, source = next(iter(sources.items()))
    own = looks[name]
    facts = own.facts[own.valid]
    if not len(facts):
        raise InputError(f"{source.name} {source.split}: none of the pictures can be read")
    return [
        _classes(source, own.label[own.valid]),
        _sizes(facts),
        _square(facts[:, 0], facts[:, 1], keeps_shape),
        _colours(facts, source.channels),
        _broken(sources, looks),
        _duplicates(sources, looks),
        *_captions(source),
        _sheet(source, own.label),
    ]


def _classes(source: Source, label: np.ndarray) -> Section:
    names = Facts.of(source).classes
    if not names:
        return Section("classes", "ok", f"{len(label):,} pictures without classes")
    counts = label.sum(0) if label.ndim == 2 else np.bincount(label[label >= 0], None, len(names))
    none = int((label.sum(1) == 0).sum() if label.ndim == 2 else (label < 0).sum())
    order = np.argsort(-counts, kind="stable")
    most, least = order[0], order[-1]
    said = (
        f"{len(names):,} classes, {len(label):,} pictures, {none:,} of them without a label; "
        f"largest: {names[most]}, {counts[most]:,.0f}; smallest: {names[least]}, "
        f"{counts[least]:,.0f}"
    )
    uneven = counts[most] > _UNEVEN * counts[least]
    remedy = "--config.loss.class_weights=balanced weighs rare classes more" * bool(uneven)
    shares = counts / max(len(label), 1)
    rows = [(names[i], f"{counts[i]:,.0f}", f"{shares[i]:.2%}") for i in order]
    table = [("class", "pictures", "share"), *rows]
    return Section("classes", "warning" if uneven else "ok", said, remedy, table)


def _sizes(facts: np.ndarray) -> Section:
    height, width, size = facts[:, :3].T
    columns = {"height": height, "width": width, "width / height": width / height, "bytes": size}
    at = (0, 5, 50, 95, 100)
    head = ("", "least", "5 %", "median", "95 %", "greatest")
    rows = [(name, *(f"{x:,.4g}" if x < 100 else f"{x:,.0f}" for x in np.percentile(values, at)))
            for name, values in columns.items()]  # fmt: skip
    said = (
        f"{height.min():.0f} x {width.min():.0f} to {height.max():.0f} x {width.max():.0f} pixels, "
        f"{size.sum() / 1e6:,.1f} MB in all"
    )
    return Section("sizes", "ok", said, table=[head, *rows])


def _square(height: np.ndarray, width: np.ndarray, keeps_shape: bool) -> Section:
    """Shares of all pixels that a square distorts, if it holds the whole picture, or cuts off."""
    short, long, area = np.minimum(height, width), np.maximum(height, width), height * width
    distorted = area[long > _STRETCHED * short].sum() / area.sum()
    cut = (area - short**2).sum() / area.sum()
    said = (
        f"a square would distort {distorted:.1%} of the pixels by more than "
        f"{_STRETCHED - 1:.0%}, or cut off {cut:.1%}"
    )
    if keeps_shape or cut < _MUCH:
        return Section("square", "ok", f"{said}{'; data.max_tokens keeps shapes' * keeps_shape}")
    remedy = "--config=folder:native keeps their shape; with a larger model folder:ViT-S/16,native"
    return Section("square", "warning", said, remedy)


def _colours(facts: np.ndarray, channels: int) -> Section:
    mean, square = facts[:, 3:].mean(0).reshape(2, channels)
    deviation = np.sqrt(np.maximum(square - mean**2, 0))
    texts = (", ".join(f"{x:.3f}" for x in values) for values in (mean, deviation))
    return Section("colours", "ok", "mean {}; standard deviation {} (of 1)".format(*texts))


def _broken(sources: Mapping[str, Source], looks: Mapping[str, Looks]) -> Section:
    broken = [(source, i) for name, source in sources.items()
              for i in np.flatnonzero(~looks[name].valid).tolist()]  # fmt: skip
    rows = [(source.record_name(i), source.why_unreadable(i) or "it is damaged; save it again")
            for source, i in broken[:_LISTED]]  # fmt: skip
    said = f"unreadable pictures: {len(broken):,}" + f", {few([r[0] for r in rows])}" * bool(rows)
    remedy = "the run leaves them out; repair or remove them" * bool(rows)
    return Section("broken", "warning" if rows else "ok", said, remedy, rows and [("", ""), *rows])


def _duplicates(sources: Mapping[str, Source], looks: Mapping[str, Looks]) -> Section:
    """Near duplicates in the training data, and of pictures in the other splits."""
    in_order = [*sources][::-1]  # the training data come last
    hashes = np.concatenate([looks[name].hashes for name in in_order])
    ordered = [sources[name] for name in in_order]
    found: Found = find(ordered, near_hashes(hashes, _DISTANCE))
    first_own = sum(source.num_examples for source in ordered[:-1])
    leaked = len(np.unique(found.pairs[found.pairs[:, 0] < first_own, 1]))
    said = f"{found.out.sum():,} pictures of {in_order[-1]} are near an earlier one"
    said += f"; {leaked:,} of them near one of {', '.join(in_order[:-1])}" * (len(sources) > 1)
    remedy = "`vit_jax duplicates` lists them for data.exclude" * bool(found.out.any())
    pictures = sections_of(found, ordered, _LISTED)[0].pictures
    return Section("duplicates", "warning" if leaked else "ok", said, remedy, pictures=pictures)


def _captions(source: Source) -> list[Section]:
    if source.captions is None:
        return []
    texts = (
        (len(text), source.record_name(i), text)
        for i, captions in enumerate(source.captions(range(source.num_examples)))
        for text in (as_bytes(c).decode("utf-8-sig", "replace") for c in captions)
    )
    rows = heapq.nlargest(_LISTED, texts)
    said = f"the longest has {rows[0][0]:,} characters" if rows else "there are none"
    return [Section("captions", "ok", said, table=[("characters", "picture", "caption"), *rows])]


def _sheet(source: Source, label: np.ndarray) -> Section:
    """Some pictures of some classes."""
    names = Facts.of(source).classes
    rows = []
    for c in spread(_CLASSES, len(names)).tolist():
        of_class = np.flatnonzero(label[:, c] if label.ndim == 2 else label == c)
        if len(of_class):
            some = of_class[spread(_EACH, len(of_class))]
            rows.append(_row(source, [names[c]] * len(some), some))
    said = f"up to {_EACH} pictures of each of {len(rows)} classes"
    return Section("pictures", "ok", said, pictures=rows)


def _row(source: Source, captions: Sequence[str], records: np.ndarray) -> list[tuple[str, bytes]]:
    """(caption, picture) of each of `records` that can be read."""
    known = small_pictures(source, records)
    pairs = zip(captions, records.tolist(), strict=True)
    return [(caption, known[record]) for caption, record in pairs if record in known]


def odd_by_features(source: Source, records: np.ndarray, x_ND: np.ndarray) -> list[Section]:
    """Sections about `records`, int64 (n,), with the features `x_ND`, NaN for unreadable pictures.

    A linear probe, cross-validated, judges the labels by confident learning (Northcutt et al. 2021,
    arXiv:1911.00068). An outlier is far from its nearest neighbours (Kuan and Mueller 2022,
    arXiv:2207.03061).
    """
    from cleanlab.outlier import OutOfDistribution

    valid = np.isfinite(x_ND).all(1)
    records, x_ND = records[valid], x_ND[valid]
    typical = OutOfDistribution().fit_score(features=x_ND, verbose=False)
    far = records[np.argsort(typical, kind="stable")[:_LISTED]]
    said = f"the {len(far)} pictures of {len(records):,} that are least like others"
    shown = _row(source, [source.record_name(i) for i in far.tolist()], far)
    outliers = Section("outliers", "ok", said, pictures=[shown])
    return [*_doubtful(source, records, x_ND), outliers, _clusters(source, records, x_ND)]


def _doubtful(source: Source, records: np.ndarray, x_ND: np.ndarray) -> list[Section]:
    """The labels that a probe, trained on the other folds, contradicts most."""
    from cleanlab.filter import find_label_issues

    if source.has_label_vectors:
        return []
    labels = read_labels(source, 0, source.num_examples)[records]
    counts = np.bincount(labels[labels >= 0], minlength=source.num_classes)
    usable = (labels >= 0) & (counts[labels] >= _FOLDS)
    classes, y = np.unique(labels[usable], return_inverse=True)
    if len(classes) < 2:
        return []
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200))
    folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=0)
    seen = cross_val_predict(probe, x_ND[usable], y, cv=folds, method="predict_proba")
    found = find_label_issues(y, seen, return_indices_ranked_by="self_confidence", n_jobs=1)
    names = Facts.of(source).classes
    rows = [
        (source.record_name(int(records[usable][i])), names[classes[y[i]]],
         names[classes[seen[i].argmax()]], f"{seen[i, y[i]]:.1%}")
        for i in found[:_LISTED]
    ]  # fmt: skip
    said = (
        f"{len(found):,} of {len(y):,} labels are doubtful; a linear probe of the features is "
        f"right in {(seen.argmax(1) == y).mean():.1%}"
    )
    captions = [f"{label}? rather {other}" for _, label, other, _ in rows]
    pictures = [_row(source, captions, records[usable][found[:_LISTED]])]
    table = [("picture", "label", "the probe says", "probability of the label"), *rows]
    state = "warning" if len(found) else "ok"
    return [Section("doubtful labels", state, said, "", table, pictures)]


def _clusters(source: Source, records: np.ndarray, x_ND: np.ndarray) -> Section:
    """Clusters by k-means, with the pictures nearest to each centre."""
    number = min(_CLUSTERS, len(records))
    model = MiniBatchKMeans(number, random_state=0, n_init=3).fit(x_ND)
    apart, rows = model.transform(x_ND), []
    for c in range(number):
        members = np.flatnonzero(model.labels_ == c)
        nearest = members[np.argsort(apart[members, c], kind="stable")[:_EACH]]
        caption = f"cluster {c + 1}: {len(members):,} pictures"
        rows.append(_row(source, [caption] * len(nearest), records[nearest]))
    said = f"{number} clusters of {len(records):,} pictures"
    return Section("clusters", "ok", said, pictures=rows)
