"""Reads that fail for a moment change nothing; those that go on failing end the run."""

import contextlib
import types

import numpy as np
import pytest
from images import encode, make_folder, smooth_image
from prepared import labelled_images, prepare
from table_files import make_table, save_to_disk, write_parquet
from tar_files import write_tar

from vit_jax.base.errors import ReadError
from vit_jax.data import image_batch, make_source, parse_ops, pipeline, retries
from vit_jax.data.sources import tables
from vit_jax.data.sources.arrays import give
from vit_jax.data.subset import keep_records

STAY_OPEN = "array_record", "arrow"  # their files, as long as the source
IMAGES = [encode(smooth_image(12, 12, seed=i)) for i in range(6)]
NAMES = [f"{i}.jpg" for i in range(6)]
LABELS = [i % 2 for i in range(6)]


def write_list(root):
    make_folder(root, {"a": 3, "b": 3})
    rows = [f"{c}/{i}.jpg,{c}" for c in "ab" for i in range(3)]
    (root / "train.csv").write_text("\n".join(["file,label", *rows]))


def write_prepared(root, **how):
    features = labelled_images(2, shape=(None, None, 3), encoding_format="jpeg")
    examples = [{"image": smooth_image(12, 12, seed=i), "label": i % 2} for i in range(6)]
    prepare(root, "six", features, examples, **how)


def write_paths(root):
    root.mkdir()
    for name, image in zip(NAMES, IMAGES, strict=True):
        (root / name).write_bytes(image)


def write_table_of_paths(root):
    write_paths(root)
    write_parquet(make_table([None] * 6, LABELS, paths=NAMES), root / "train.parquet")


WRITE = {
    "folder": lambda root: make_folder(root, {"a": 3, "b": 3}),
    "list": write_list,
    "tfrecord": write_prepared,
    "array_record": lambda root: write_prepared(root, file_format="array_record"),
    "tar": lambda root: write_tar(
        root / "train.tar",
        [(f"{i}.{e}", c) for i in range(6) for e, c in (("jpg", IMAGES[i]), ("cls", b"1"))],
    ),
    "parquet": lambda root: write_parquet(make_table(IMAGES, LABELS), root / "train.parquet", 2),
    "parquet of paths": write_table_of_paths,
    "arrow": lambda root: save_to_disk({"train": make_table(IMAGES, LABELS)}, root),
    "arrays": write_paths,
}


@contextlib.contextmanager
def opened(kind, root):
    WRITE[kind](root)
    name = {"tfrecord": "six", "array_record": "six"}.get(kind, kind.partition(" ")[0])
    items = {"train": ([root / name for name in NAMES], LABELS)} if kind == "arrays" else None
    reader = {"tfrecord": "offsets", "array_record": "array_record"}.get(kind)
    with give(items) as overrides:
        yield make_source(
            overrides.get("data.name", name), split="train", data_dir=str(root), reader=reader,
            image_size=(8, 8),
        )  # fmt: skip


def read(source):
    spec = image_batch(6, (8, 8), parse_ops("decode|resize(8)", (8, 8))[0])
    (batch,) = pipeline.host_eval_batches(source, spec, rows=np.arange(6))
    return batch


@pytest.fixture
def pauses(monkeypatch):
    """The pauses asked for; none is made. A function in `then` is called once, at the first."""
    found = types.SimpleNamespace(seconds=[], then=[])

    def sleep(seconds):
        found.seconds.append(seconds)
        with contextlib.suppress(IndexError):
            found.then.pop()()

    monkeypatch.setattr(tables.Kept, "get", lambda kept, key, read, size: read())
    monkeypatch.setattr(retries, "time", types.SimpleNamespace(sleep=sleep))
    return found


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        *((kind, False) for kind in WRITE),
        ("tfrecord", True),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in WRITE if kind != "tfrecord"),
    ],
)  # fmt: skip
def test_a_folder_that_is_away_for_a_moment(kind, kept, tmp_path, pauses):
    root, away = tmp_path / "data", tmp_path / "away"
    with opened(kind, root) as source:
        source = keep_records(source, np.arange(source.num_examples)) if kept else source
        root.rename(away)
        pauses.then.append(lambda: away.rename(root))
        batch = read(source)
        assert batch["mask"].tolist() == [i < source.num_examples for i in range(6)]
        again = read(source)
        for key in batch:
            np.testing.assert_array_equal(batch[key], again[key])


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind in ("arrays", "parquet", "tar") else ())
     for kind in WRITE if kind not in STAY_OPEN],
)  # fmt: skip
def test_a_folder_that_is_gone_ends_the_run(kind, tmp_path, pauses):
    root = tmp_path / "data"
    with opened(kind, root) as source:
        root.rename(tmp_path / "away")
        with pytest.raises(ReadError, match=r"7 tries in 32 s .*run the same command to continue"):
            read(source)
        retries._failed.clear()  # of other threads
        assert {*pauses.seconds} == {0.5, 1, 2, 4, 8, 16}
        (tmp_path / "away").rename(root)
        assert read(source)["mask"].tolist() == [1] * source.num_examples + [0] * (
            6 - source.num_examples
        )
