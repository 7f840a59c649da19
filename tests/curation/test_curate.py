"""Curated parts: equally many records of each cluster, or those most like another set."""

import argparse
import dataclasses
import json

import numpy as np
import pytest
from images import encode, write_images
from prepared_sets import plan_of
from tar_files import write_tar

from vit_jax.base.errors import InputError
from vit_jax.commands.flags import open_source
from vit_jax.config.sections import Data
from vit_jax.curation import nearest
from vit_jax.curation.clusters import find_clusters, sample_balanced, split_evenly
from vit_jax.curation.features import Features
from vit_jax.curation.nearest import find_nearest
from vit_jax.curation.shards import open_splits
from vit_jax.data import Division, make_source
from vit_jax.data.id_files import ids_to_bytes, read_ids
from vit_jax.data.images.formats import Reading
from vit_jax.main import main

SIZES = 1000, 400, 29, 8  # of four heaps of features, one for each digit of the training split
HEAP_N = np.random.default_rng(0).permutation(np.repeat(np.arange(4), SIZES))


def write_features(folder, x_ND, data="data", model="model"):
    """Write features in two parts, as `predict --features=DIR` does."""
    folder.mkdir()
    size = len(x_ND) // 2 + 1
    for part, first in enumerate(range(0, len(x_ND), size)):
        np.save(folder / f"part_{part:05}.npy", x_ND[first : first + size].astype(np.float16))
    facts = {"what": "features", "fingerprint": data, "weights": model, "records_of_part": size}
    (folder / "predictions.json").write_text(json.dumps(facts))
    (folder / "summary.json").write_text(json.dumps({"rows": len(x_ND)}))
    return folder


def heaps(labels, seed):
    """Features in four heaps, which are two pairs of close ones; all of different lengths."""
    centres = np.array([[1, 0.3, 0], [1, -0.3, 0], [0, 0.3, 1], [0, -0.3, 1]])
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(len(labels), 3))
    return (centres[labels] + 0.001 * noise) * rng.uniform(0.1, 10, (len(labels), 1))


def digits(**more):
    return make_source("digits", split="train", image_size=(8, 8), **more)


@pytest.fixture
def features(tmp_path):
    """The folder of a feature for each digit; the last record cannot be read."""
    x_ND = heaps(HEAP_N, seed=1)
    x_ND[-1] = np.nan
    return write_features(tmp_path / "features", x_ND, digits().fingerprint)


@pytest.mark.parametrize(
    ("total", "parts"),
    [(89, [60, 20, 6, 3]), (16, [5, 4, 4, 3]), (21, [6, 6, 6, 3]), (0, [0, 0, 0, 0])],
)
def test_a_number_is_split_evenly_as_far_as_clusters_have_so_many(total, parts):
    sizes = np.array([60, 0, 20, 6, 3])
    found = split_evenly(sizes, total, np.random.default_rng(0))
    assert (found <= sizes).all() and sorted(found, reverse=True) == [*parts, 0]


def test_a_tree_by_hand():
    """Top clusters {0, 1} and {2, 3, 4} of 40 and 12 records share 20: 10 each. These are split
    into 8 and 2, and into 5, 4 and 1. The record without a cluster is never kept.
    """
    label_N = np.concatenate([np.repeat(range(5), [38, 2, 7, 4, 1]), [-1]])
    parents = [np.array([0, 0, 1, 1, 1])]
    kept = sample_balanced(label_N, parents, 20, seed=0)
    assert list(np.bincount(label_N[kept])) == [8, 2, 5, 4, 1]
    assert (np.diff(kept) > 0).all()
    assert (kept == sample_balanced(label_N, parents, 20, seed=0)).all()
    assert (kept != sample_balanced(label_N, parents, 20, seed=1)).any()


def test_a_level_with_empty_clusters():
    """Of three clusters above the four only two have some; the top shares 6 records evenly."""
    label_N, parents = np.repeat(range(4), 5), [np.array([0, 0, 1, 1]), np.array([0, 1, 1])]
    kept = sample_balanced(label_N, parents, 6, seed=0)
    assert np.bincount(label_N[kept] // 2).tolist() == [3, 3]


def test_a_part_of_unreadable_pictures_has_no_cluster(tmp_path):
    x_ND = heaps(HEAP_N[:60], seed=1)
    x_ND[31:] = np.nan  # the second part
    features = Features.open(write_features(tmp_path / "features", x_ND), "")
    label_N, _ = find_clusters(features, [3, 2], seed=0)
    assert ((label_N < 0) == np.isnan(x_ND[:, 0])).all()


def test_a_balanced_part_is_trained_on(features, tmp_path, capsys):
    """Two pairs of heaps share 60 records: 15 and 15, and 22 and 8, as the last has no more."""
    words = ["curate", str(features), "--clusters=4,2", "--keep=60"]
    contents = []
    for name in ("a.npz", "b.npz"):
        assert main([*words, f"--output={tmp_path / name}"]) == 0
        contents.append((tmp_path / name).read_bytes())
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == {"output": str(tmp_path / "b.npz"), "kept": 60, "of": len(HEAP_N)}
    kept, fingerprint = read_ids(tmp_path / "a.npz", "key")
    fourth = min(8, (HEAP_N[:-1] == 3).sum())
    assert list(np.bincount(HEAP_N[kept])) == [15, 15, 30 - fourth, fourth]
    assert contents[0] == contents[1] and len(HEAP_N) - 1 not in kept
    whole, part = digits(), digits(subset=(str(tmp_path / "a.npz"), False, 0))
    assert fingerprint == whole.fingerprint != part.fingerprint
    found = part.read(np.arange(part.num_examples))["image"].numpy()
    assert (found == whole.read(kept)["image"].numpy()).all()
    plan = plan_of(tmp_path / "prepared", splits=("train", "test"))
    data = Data(name="digits", subset=str(tmp_path / "a.npz"))
    sources = open_splits(dataclasses.replace(plan, data=data))
    assert [source.num_examples for source in sources.values()] == [60, 360]


def test_the_records_most_like_another_set(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    folders = [write_features(tmp_path / str(n), rng.normal(size=(n, 5)), f"{n}") for n in (50, 3)]
    words = ["curate", str(folders[0]), f"--near={folders[1]}", "--neighbours=4"]
    assert main([*words, f"--output={tmp_path / 'near.npz'}"]) == 0
    kept, fingerprint = read_ids(tmp_path / "near.npz", "key")
    opened = [Features.open(folder, "") for folder in folders]
    x_ND, y_MD = (np.concatenate([x for _, x in found.read()]) for found in opened)
    assert {*kept} == {*np.argsort(-y_MD @ x_ND.T, axis=1)[:, :4].ravel()} and fingerprint == "50"
    monkeypatch.setattr(nearest, "_SIMILARITIES_AT_ONCE", 21)  # 7 records at once
    assert (find_nearest(*opened, 4) == kept).all()


def test_parts_that_there_are_not(features, tmp_path, capsys):
    other = write_features(tmp_path / "other", heaps(HEAP_N[:9], 3), model="another")
    unfinished = write_features(tmp_path / "unfinished", heaps(HEAP_N[:9], 3))
    (unfinished / "summary.json").unlink()
    for words, says in (
        ([features, "--clusters=4", "--keep=1437"], "--keep=1437: there are only 1436 records"),
        ([other, "--clusters=10", "--keep=5"], "--clusters=10: there are only 9 records"),
        ([features, f"--near={other}"], f"--near={other}: another model computed these"),
        ([unfinished, "--clusters=4", "--keep=1"], "has no features of all records"),
    ):
        assert main(["curate", *map(str, words), f"--output={tmp_path / 'no.npz'}"]) == 2
        assert says in capsys.readouterr().err and not (tmp_path / "no.npz").exists()


def test_files_of_ids_that_are_refused(tmp_path):
    path, whole = tmp_path / "ids.npz", digits().fingerprint

    def refusal():
        with pytest.raises(InputError) as e:
            digits(subset=(str(path), False, 0))
        return str(e.value)

    assert "there is no such file" in refusal()
    path.write_text("1 2 3")
    assert "is not a file of record ids" in refusal()
    for ids in ([2, 1], [1, 1]):
        path.write_bytes(ids_to_bytes(np.array(ids), whole))
        assert "needs `record`, rising numbers" in refusal()
    path.write_bytes(ids_to_bytes(np.array([]), whole))
    assert "names no record" in refusal()
    for ids, of in (([1, 2], "other data"), ([-1, 2], whole), ([1, 1437], whole)):
        path.write_bytes(ids_to_bytes(np.array(ids), of))
        assert "digits train is not the data of this file" in refusal()


def test_features_for_a_new_run_are_of_its_records(tmp_path):
    """The classes, the division and the captions are the new run's, not the model's."""
    names = enumerate(["ant", "yak", "zebra"] * 4)
    images = {f"{name}/{i}.png": np.full((8, 8, 3), i, np.uint8) for i, name in names}
    write_images(tmp_path / "images", images)
    black = encode(np.zeros((8, 8, 3), np.uint8), "PNG")
    pairs = (((f"{i}.png", black), (f"{i}.txt", f"a dog and {i}".encode())) for i in range(3))
    write_tar(tmp_path / "0.tar", [file for pair in pairs for file in pair])
    spec = argparse.Namespace(
        image_size=(8, 8), reading=Reading(), class_names=("yak", "zebra")
    )  # fmt: skip
    model = argparse.Namespace(spec=spec, division=Division(), source="model")
    for name, where, read_as in (("folder", "images", "labels"), ("tar", "", "captions")):
        how = {"split": "train", "image_size": (8, 8), "data_dir": str(tmp_path / where)}
        flags = argparse.Namespace(data=f"{name}:train", data_dir=how["data_dir"])
        of_run = make_source(name, captions=read_as == "captions", **how).fingerprint
        assert open_source(flags, model, (), read_as).fingerprint == of_run
        assert open_source(flags, model, ()).fingerprint != of_run
