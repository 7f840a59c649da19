"""Mixtures: their notation, what they hold, and what is refused."""

import dataclasses

import numpy as np
import pytest
from at_fault import at_fault
from images import encode
from opened import open_all
from prepared import labelled_images, prepare
from read_settings import settings_of
from table_files import make_table, write_parquet
from tar_files import write_tar

from vit_jax.config import SplitKey, train_split, with_values
from vit_jax.config.stored import from_json, to_json
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.data import concatenate, image_batch, make_source, parse_mix, parse_ops, pipeline
from vit_jax.data.host_tf import tf
from vit_jax.data.mixture import Part, share_images
from vit_jax.data.sources import tfds as tfds_data
from vit_jax.run.setup import validation
from vit_jax.run.setup.sources import training_order
from vit_jax.run.setup.validation import find_faults


def test_notation():
    assert parse_mix("") == ()
    assert parse_mix("cifar10=0.3") == (Part("cifar10", None, 0.3),)
    text = "sun397/tfds:4.0.0@train[:50%]+test[10:]=0.25, digits=1e-3"
    assert parse_mix(text) == (
        Part("sun397/tfds:4.0.0", "train[:50%]+test[10:]", 0.25),
        Part("digits", None, 0.001),
    )


LIST = [{"name": "parquet", "data_dir": "b", "weight": 0.25}]


def test_a_list_of_dicts_is_kept_as_its_text():
    """From a config file, from Python and from the command line, through config.json too."""
    assert parse_mix(repr(LIST)) == (Part("parquet", None, 0.25, "b"),)
    config = config_of(mix=repr(tuple(LIST)))
    of_file = load_config("quickstart:debug")
    of_file.data.mix = LIST
    assert of_file == validation.load_config("quickstart:debug", {"data.mix": LIST}) == config
    assert from_json(to_json(config)) == config and find_faults(config) == []


@pytest.mark.parametrize(
    "entry",
    [3, {"name": "a"}, {"name": "", "weight": 0.1}, {"name": "a", "weight": 1.5},
     {"name": "a", "weight": "0.1"}, {"name": "a", "weight": 0.1, "folder": "b"}],
)  # fmt: skip
def test_entries_of_a_list_that_are_refused(entry):
    with at_fault("data.mix"):
        parse_mix(repr([entry]))


@pytest.mark.parametrize(
    ("mix", "said"),
    [("folder=0.25", "is there already"), ("folder@train=0.25", "is there already"),
     ("folder@val=0.25", None), ("list=0.1,list=0.2", "is there already"),
     ([{"name": "folder", "data_dir": "x/../a", "weight": 0.25}], "is there already"),
     ([{"name": "folder", "data_dir": "b", "weight": 0.25}], "images in 2 folders"),
     ([{"name": "tar", "data_dir": "b", "weight": 0.25}], None)],
)  # fmt: skip
def test_data_that_are_not_mixed(mix, said):
    config = config_of(name="folder", data_dir="a", mix=str(mix))
    faults = find_faults(config)
    assert [said in fault for fault in faults] == [True] * bool(said)


@pytest.mark.parametrize(
    ("split", "other", "shared"),
    [("train", "train[:50%]", True), ("train[:60%]", "train[50%:]", True), ("test", "all", True),
     ("val", "validation[:9]", True), ("train[:50%]", "train[50%:]", False),
     ("train[:1000]", "train[1000:]+test", False), ("train", "test", False),
     ("train", "train[9000000:]", False)],
)  # fmt: skip
def test_parts_of_a_data_set_that_overlap(split, other, shared):
    assert share_images(SplitKey("tar", split, "a"), SplitKey("tar", other, "b/../a")) == shared
    assert not share_images(SplitKey("tar", split, "a"), SplitKey("tar", other, "b"))


def test_tar_files_beside_parquet_files(tmp_path, caplog):
    images = [encode(np.full((8, 8, 3), i, np.uint8), "PNG") for i in range(8)]
    members = [(f"{i}.{end}", content) for i, image in enumerate(images[:5])
               for end, content in (("png", image), ("cls", b"%d" % (i % 2)))]  # fmt: skip
    write_tar(tmp_path / "a/train.tar", members)
    table = make_table(images[5:], [0, 1, 1], names=["0", "1"])
    write_parquet(table, tmp_path / "b/train.parquet")
    mix = [{"name": "parquet", "data_dir": str(tmp_path / "b"), "weight": 0.25}]
    config = config_of(name="tar", data_dir=str(tmp_path / "a"), mix=str(mix))
    _, sources = open_all(with_values(config, {"evals.test": None}))
    source = sources[train_split(settings_of(config).data)]
    spec = image_batch(8, (8, 8), parse_ops("decode|resize", (8, 8))[0], "data.ops")
    (batch,) = pipeline.host_eval_batches(source, spec, rows=np.arange(8))
    np.testing.assert_array_equal(batch["image"][:, 0, 0, 0], np.arange(8))
    np.testing.assert_array_equal(batch["label"], [0, 1, 0, 1, 0, 0, 1, 1])
    assert "share images" not in caplog.text
    open_all(with_values(config, {"evals.test": None, "data.mix": "tar@train[:60%]=0.25"}))
    assert "train and train[:60%] of tar may share images" in caplog.text
    mixed = with_values(config, {"evals.test.split": "train[60%:]", "data.mix": "tar@train=0.25",
                                 "data.split": "train[:60%]"})  # fmt: skip
    open_all(mixed)
    assert "tar train is trained on, and evals.test measures these images" in caplog.text
    with at_fault("data.mix"):  # as data.split=all
        open_all(with_values(config, {"evals.test": None, "data.mix": "tar@all=0.25"}))


@pytest.fixture(scope="module")
def digits():
    return [make_source("digits", split=split, image_size=(8, 8)) for split in ("train", "test")]


def test_pixels_lie_one_after_the_other(digits):
    both = concatenate(digits)
    assert (both.num_examples, both.part_sizes, both.encoded) == (1797, (1437, 360), False)
    ids = tf.constant([0, 1436, 1437, 1796, 5], tf.int64)
    found = both.read(ids)
    for i, record in enumerate(ids.numpy()):
        part, own = (digits[0], record) if record < 1437 else (digits[1], record - 1437)
        for key, column in part.read(tf.constant(own)).items():
            np.testing.assert_array_equal(found[key][i], column)
    assert both.record_name(1440) == "record 3 of digits test"
    assert both.fingerprint not in (digits[0].fingerprint, concatenate(digits[::-1]).fingerprint)


def test_pseudo_labels_without_names(digits, caplog):
    """They take the names of as many classes, with one warning."""
    named = dataclasses.replace(digits[0], class_names=tuple("abcdefghij"))
    nameless = dataclasses.replace(digits[1], name="pseudo", class_names=None)
    assert concatenate([named, nameless, nameless]).class_names == named.class_names
    assert len(caplog.messages) == 1 and "gives no names of classes" in caplog.text
    with at_fault("data.mix"):
        concatenate([named, dataclasses.replace(nameless, num_classes=9)])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Two data sets of PNGs of one size; image i of one is i everywhere, of the other 100 + i."""
    root = tmp_path_factory.mktemp("tiny")
    for name, n, base in (("tens", 10, 0), ("sixes", 6, 100)):
        features = labelled_images(10, shape=(8, 8, 3), encoding_format="png")
        images = [np.full((8, 8, 3), base + i, np.uint8) for i in range(n)]
        examples = [{"image": image, "label": i} for i, image in enumerate(images)]
        prepare(root, name, features, examples, examples_per_shard=4)
    return root


def of_tiny(root, name, reader):
    return make_source(name, split="train", data_dir=str(root), image_size=(8, 8), reader=reader)


@pytest.mark.slow
def test_encoded_sources_with_and_without_record_files(tiny):
    tens, sixes = (of_tiny(tiny, name, "offsets") for name in ("tens", "sixes"))
    kept = dataclasses.replace(sixes, record_files=None)
    for parts in ([tens, sixes], [kept, tens]):
        source = concatenate(parts)
        (batch,) = pipeline.host_eval_batches(source, image_batch(16, (8, 8)), rows=np.arange(16))
        assert batch["mask"].all()
        tens_first = [*range(10), *range(100, 106)]
        expected = tens_first if parts[0] is tens else tens_first[10:] + tens_first[:10]
        np.testing.assert_array_equal(batch["image"][:, 0, 0, 0], expected)
        np.testing.assert_array_equal(batch["label"], [v % 100 for v in expected])
        example = source.read(tf.constant(12, tf.int64))
        assert int(example["label"]) == expected[12] % 100


def test_what_does_not_go_together_is_refused(digits, tiny):
    with at_fault("data.mix") as error:
        concatenate([of_tiny(tiny, "tens", "memory"), of_tiny(tiny, "sixes", "offsets")])
    message = str(error.value)
    assert "data.reader=None" in message and "data.reader=memory" in message
    other = dataclasses.replace(digits[1], class_names=("a",) * 10)
    with at_fault("data.mix"):
        concatenate([digits[0], other])


def config_of(**overrides):
    config = load_config("configs/quickstart.py:debug")
    overrides = [(f"data.{key}", value) for key, value in overrides.items()]
    assert not apply_overrides(config, overrides)
    return config


def test_a_mixture_in_a_config():
    config, sources = open_all(config_of(mix="digits@test=0.25", order="chunk"))
    assert (config.data.num_examples, config.data.streams) == (1797, 8)
    mixture = sources[train_split(settings_of(config).data)]
    assert mixture.part_sizes == (1437, 360)
    assert sources[SplitKey("digits", "test", None)].num_examples == 360
    ids = training_order(settings_of(config).data, settings_of(config).run, mixture)(
        tf.range(4 * 360, dtype=tf.int64)
    ).numpy()
    np.testing.assert_array_equal(np.sort(ids[ids >= 1437]), np.arange(1437, 1797))
    with at_fault("data.num_examples"):
        open_all(config_of(mix="digits@test=0.25", num_examples="5"))
    with at_fault("data.mix"):
        open_all(config_of(mix="digits@val=0.25"))


def mixed_tiny(root, mix="sixes=0.25", **overrides):
    """The pixels of the first batches, and the sources."""
    config = config_of(name="tens", data_dir=str(root), mix=mix, **overrides)
    config, sources = open_all(with_values(config, {"evals.test": None}))
    mixture = sources[train_split(settings_of(config).data)]
    batches = pipeline.host_batches(
        mixture, image_batch(16, (8, 8)), steps=range(3), seed=0, rows=np.arange(16),
        data_order=training_order(settings_of(config).data, settings_of(config).run, mixture),
    )  # fmt: skip
    return list(batches), sources


@pytest.mark.slow
def test_what_is_mixed_does_not_depend_on_what_fits_into_memory(tiny, monkeypatch):
    expected, sources = mixed_tiny(tiny)
    assert not any(source.encoded for source in sources.values())
    monkeypatch.setattr(tfds_data, "_SMALL_BYTES", 2500)  # only sixes are small
    found, sources = mixed_tiny(tiny)
    assert all(source.encoded and source.record_files for source in sources.values())
    for batch, other in zip(found, expected, strict=True):
        for key in other:
            np.testing.assert_array_equal(batch[key], other[key])
    with at_fault("data.mix"):
        mixed_tiny(tiny, mix="digits=0.25", reader="offsets")


@pytest.mark.slow
def test_sets_in_memory_whose_images_differ_in_size_are_mixed_from_their_files(tiny):
    features = labelled_images(10, shape=(9, 8, 3), encoding_format="png")
    prepare(tiny, "tall", features, [{"image": np.zeros((9, 8, 3), np.uint8), "label": 0}])
    how = {"name": "tens", "data_dir": str(tiny), "mix": "tall=0.25"}
    config, sources = open_all(with_values(config_of(**how), {"evals.test": None}))
    assert sources[train_split(settings_of(config).data)].encoded
    with at_fault("data.mix"):
        open_all(config_of(**how, reader="memory"))


def test_without_a_mixture_the_order_is_resolved():
    config, sources = open_all(config_of())
    assert (config.data.order, config.data.streams) == ("record", None)
    assert train_split(settings_of(config).data) == SplitKey("digits", "train", None)
    assert sources[train_split(settings_of(config).data)].part_sizes == (1437,)
