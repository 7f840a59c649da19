"""Prepared TFDS data sets, real ones and small ones made here."""

import types

import numpy as np
import pytest
from at_fault import at_fault, refused_with
from images import encode, smooth_image
from prepared import labelled_images, prepare

from vit_jax.base.errors import ReadError
from vit_jax.data import make_source, records, retries
from vit_jax.data.host_tf import tf, tfds
from vit_jax.data.images.formats import to_pixels
from vit_jax.data.sources import tfds as tfds_data


def source(name, data_dir, split="train", **fields):
    return make_source(name, split=split, data_dir=str(data_dir), image_size=(8, 8), **fields)


def read(source, record_id):
    example = source.read(tf.constant(record_id, tf.int64))
    return example["image"].numpy(), int(example["label"]), float(example["mask"])


def as_dataset(directory, split, encoded=False):
    builder = tfds.builder_from_directory(directory)
    decoders = {"image": tfds.decode.SkipDecoding()} if encoded else None
    return builder.as_dataset(split=split, decoders=decoders).as_numpy_iterator()


def test_cifar10_in_file_order(shared_data):
    part = "test[4970:5030]"
    cifar = source("cifar10:3.0.2", shared_data, part, num_classes=10, num_examples=60)
    assert (cifar.image_shape, cifar.encoded) == ((32, 32, 3), False)
    assert cifar.class_names[:2] == ("airplane", "automobile")
    # The fourth file ends at 5000. TFDS's own order would mix the two.
    directory = shared_data / "cifar10/3.0.2"
    expected = [
        *as_dataset(directory, "test[4970:5000]"),
        *as_dataset(directory, "test[5000:5030]"),
    ]
    for record, example in enumerate(expected):
        image, label, mask = read(cifar, record)
        np.testing.assert_allclose(image.astype(int), example["image"], atol=8)  # another DCT
        assert (label, mask) == (example["label"], 1)


def test_subset_splits_add_up(shared_data):
    first, last, both = (
        source("cifar10", shared_data, s, reader="offsets")
        for s in ("test[:90%]", "test[90%:]", "test[9000:9001]+test[:1]")
    )
    assert (first.num_examples, last.num_examples) == (9000, 1000)
    assert read(both, 0) == read(last, 0) and read(both, 1) == read(first, 0)


def test_imagenet_sample_stays_encoded(shared_data):
    sample = source("imagenet_sample", shared_data, "train[:5]", num_classes=1000, num_examples=5)
    assert sample.encoded and sample.image_shape is None
    expected = as_dataset(shared_data / "imagenet_sample/1.0.0", "train[:5]", encoded=True)
    for record, example in enumerate(expected):
        assert read(sample, record) == (example["image"], example["label"], 1)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Small data sets, prepared as TFDS would."""
    root = tmp_path_factory.mktemp("prepared")
    label = tfds.features.ClassLabel(names=["no", "yes"])
    colour = tfds.features.Image(shape=(60, 90, 3), encoding_format="jpeg")

    (root / "broken.jpg").write_bytes(encode(smooth_image())[:500])
    broken = [
        {"image": smooth_image(), "label": 1},
        {"image": str(root / "broken.jpg"), "label": 1},
    ]
    prepare(root, "broken", {"image": colour, "label": label}, [*broken, broken[0]])
    grey = {"image": smooth_image(8, 8)[..., :1], "label": 1, "extra": 0}
    grey_features = {
        "image": tfds.features.Image(shape=(8, 8, 1)),
        "label": label,
        "extra": np.int64,
    }
    prepare(root, "grey", grey_features, [grey])
    prepare(root, "grey", grey_features, [grey, grey], version="1.10.0")
    prepare(root, "grey", grey_features, [grey, grey, grey], version="1.9.0")
    prepare(
        root,
        "no_labels",
        {"image": colour, "label": label},
        [{"image": smooth_image(), "label": -1}],
    )
    prepare(
        root, "boxes", {"image": colour, "boxes": np.int64}, [{"image": smooth_image(), "boxes": 1}]
    )
    return root


def test_grey_becomes_rgb_and_the_newest_version_is_read(prepared):
    newest = source("grey", prepared)
    assert newest.num_examples == 2 and "1.10.0" in newest.record_name(0)
    np.testing.assert_array_equal(read(newest, 0)[0], smooth_image(8, 8)[..., :1].repeat(3, -1))
    older = source("grey:1.9.0", prepared, reader="offsets")
    assert older.num_examples == 3 and older.fingerprint != newest.fingerprint


def prepare_one(root, image, dtype, shape):
    features = labelled_images(2, shape=shape, dtype=dtype)
    prepare(root, "typed", features, [{"image": image, "label": 1}])


@pytest.mark.parametrize(
    ("dtype", "shape", "value", "pixel", "reader"),
    [
        (np.uint8, (4, 4, 2), 7, 7, "memory"),
        (np.uint8, (4, 4, 4), 7, 7, "offsets"),
        (np.uint8, (4, 4, None), 7, 7, "memory"),
        (np.uint16, (4, 4, 3), 7 * 257, 7, "memory"),
        (np.uint16, (4, 4, 1), 65535, 255, "offsets"),
    ],
)
def test_channels_and_types_of_images(tmp_path, dtype, shape, value, pixel, reader):
    prepare_one(tmp_path, np.full([side or 3 for side in shape], value, dtype), dtype, shape)
    image, label, mask = read(source("typed", tmp_path, reader=reader), 0)
    if isinstance(image, bytes):
        image = to_pixels(tf.constant(image)).numpy()
    np.testing.assert_array_equal(image, np.full((4, 4, 3), pixel, np.uint8))
    assert (label, mask) == (1, 1)


def test_images_without_pixels_are_refused(tmp_path):
    prepare_one(tmp_path / "depth", np.full((4, 4, 1), 0.5, np.float32), np.float32, (4, 4, 1))
    with at_fault("data.name"):
        source("typed", tmp_path / "depth")
    (tmp_path / "clip.gif").write_bytes(encode(smooth_image(4, 4), "GIF"))
    prepare_one(tmp_path / "clip", str(tmp_path / "clip.gif"), np.uint8, (None, 4, 4, 3))
    with at_fault("data.name"):
        source("typed", tmp_path / "clip")


def test_a_set_prepared_in_another_order_has_another_fingerprint(tmp_path):
    features = labelled_images(5, shape=(8, 8, 3))
    examples = [{"image": smooth_image(8, 8, i), "label": i} for i in range(5)]

    def fingerprint(name, order, reader="offsets"):
        if not (tmp_path / name).exists():
            prepare(tmp_path / name, "five", features, [examples[i] for i in order])
        return source("five", tmp_path / name, reader=reader).fingerprint

    first = fingerprint("first", range(5), "memory")
    assert fingerprint("again", range(5)) == first
    others = [fingerprint(f"{i}", order) for i, order in enumerate(([1, 0, 2, 3, 4],
              [0, 1, 3, 2, 4], [0, 1, 2, 4, 3]))]  # fmt: skip
    assert len({first, *others}) == 4


def test_the_fingerprint_of_jpegs_does_not_depend_on_the_decoder(prepared, monkeypatch):
    before = {
        name: source(name, prepared, reader="offsets").fingerprint for name in ("broken", "grey")
    }
    monkeypatch.setattr(records, "to_pixels", lambda image: to_pixels(image) // 2)
    assert source("broken", prepared, reader="offsets").fingerprint == before["broken"]
    assert source("grey", prepared, reader="offsets").fingerprint != before["grey"]  # PNG


def test_a_read_that_fails_for_now_is_no_broken_record(prepared, monkeypatch):
    def fail(*_):
        raise tf.errors.UnavailableError(None, None, "the store does not answer")

    monkeypatch.setattr(records, "untuned", fail)
    monkeypatch.setattr(retries, "_PAUSES", (0,))
    with pytest.raises(ReadError, match="does not answer"):
        source("grey", prepared)


def test_a_damaged_array_record_is_a_broken_record(tmp_path):
    features = labelled_images(2, shape=(8, 8, 3))
    examples = [{"image": smooth_image(8, 8, i), "label": 1} for i in range(2)]
    prepare(tmp_path, "two", features, examples, file_format="array_record")
    intact = source("two", tmp_path, reader="array_record").fingerprint
    (path,) = tmp_path.rglob("*.array_record*")
    content = bytearray(path.read_bytes())
    content[120:130] = bytes(10)
    path.write_bytes(content)
    assert source("two", tmp_path, reader="array_record").fingerprint != intact
    assert read(source("two", tmp_path, reader="memory"), 0)[2] == 0


def refused(name, data_dir, *words, **fields):
    with refused_with(*words):
        source(name, data_dir, **fields)


def test_unfit_data_sets_are_refused(prepared):
    refused("boxes", prepared, "data.name='boxes'", "'label', a ClassLabel")
    refused("no_labels", prepared, "holds unlabelled examples")
    refused("grey", prepared, "data.split='val'", "['train']", split="val")
    refused("grey", prepared, "data.split='train[2:2]'", "no examples", split="train[2:2]")
    for backwards in ("train[2:1]", "train[2:1]+train"):
        refused("grey:1.9.0", prepared, f"data.split={backwards!r}", "before", split=backwards)
    refused("grey", prepared, "data.num_examples=3", "has 2", num_examples=3)


def test_a_missing_data_set_is_named_with_its_place_and_the_way_to_get_it(prepared):
    refused(
        "mnist", prepared, f"{prepared}/mnist", "features.json", "tfds.builder('mnist', data_dir="
    )
    refused("digit", prepared, "did you mean 'digits'?", "data.data_dir")
    refused("grey:2.0.0", prepared, "grey/2.0.0/features.json", "there: 1.0.0, 1.10.0, 1.9.0")
    refused("grey/tfds", prepared, f"{prepared}/grey/tfds/VERSION")
    refused("../grey", prepared, "data.name='../grey'; needed")
    words = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", f"{prepared}/downloads/manual"
    refused("imagenet2012", prepared, "tfds.builder('imagenet2012', data_dir=", *words)


def test_missing_and_damaged_files_are_refused(prepared, tmp_path):
    shard = next((prepared / "grey/1.9.0").glob("*.tfrecord*"))
    contents = shard.read_bytes()
    shard.write_bytes(contents[:-10])
    refused("grey:1.9.0", prepared, f"{shard} is damaged", "record 2 ends at byte")
    shard.unlink()
    refused("grey:1.9.0", prepared, str(shard), "is missing")
    shard.write_bytes(contents)


def test_what_does_not_fit_into_memory_is_refused(prepared, monkeypatch):
    memory = types.SimpleNamespace(available=80_000)
    monkeypatch.setattr(tfds_data.psutil, "virtual_memory", lambda: memory)
    refused(
        "broken",
        prepared,
        "loading 3 examples takes about 0.0 GiB",
        "'train[:10%]'",
        reader="memory",
    )
    assert source("broken", prepared).encoded
    assert not source("broken", prepared, "train[:1]", reader="memory").encoded
