"""data.classes: the records of some classes, with labels of their own, from any reader."""

import numpy as np
import pytest
from at_fault import at_fault
from images import encode, smooth_image
from opened import open_all, with_known_facts
from prepared import prepare
from read_settings import settings_of, splits_of

from vit_jax.config import base_config, classification, fewshot, train_split
from vit_jax.config.durations import total_steps
from vit_jax.data import image_batch, keep_classes, make_source, parse_ops, pipeline, read_labels
from vit_jax.data.host_tf import tfds
from vit_jax.run.setup.sources import training_order

SIZE = (16, 16)
CLASSES = (2, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data set of 30 small images of three classes."""
    root = tmp_path_factory.mktemp("data")
    names = ["ant", "bee", "cat"]
    features = {
        "image": tfds.features.Image(shape=(*SIZE, 3), encoding_format="png"),
        "label": tfds.features.ClassLabel(names=names),
    }
    rng = np.random.default_rng(0)
    examples = [
        {"image": rng.integers(0, 256, (*SIZE, 3), np.uint8), "label": int(label)}
        for label in rng.integers(0, 3, 30)
    ]
    prepare(root, "insects", features, examples, examples_per_shard=11)
    return root, [example["label"] for example in examples]


def open_insects(root, reader, classes=CLASSES):
    where = {"split": "train", "image_size": SIZE, "data_dir": str(root), "reader": reader}
    return make_source("insects", classes=classes, **where)


def batches(source, steps=4):
    return pipeline.host_batches(
        source,
        image_batch(8, SIZE, parse_ops("decode", SIZE)[0] if source.encoded else ()),
        steps=range(1, 1 + steps),
        seed=3,
        rows=np.arange(8),
    )


@pytest.fixture(scope="module")
def in_memory(folder):
    return open_insects(folder[0], "memory")


def test_labels_are_renumbered_in_the_order_given(folder, in_memory):
    root, labels = folder
    whole, source = open_insects(root, "memory", None), in_memory
    kept = [i for i, label in enumerate(labels) if label in CLASSES]
    assert source.num_examples == len(kept) < 30 and source.part_sizes == (len(kept),)
    assert (source.num_classes, source.class_names) == (2, ("cat", "ant"))
    found = read_labels(source, 0, source.num_examples)
    assert [CLASSES[label] for label in found] == [labels[i] for i in kept]
    assert source.record_name(3) == whole.record_name(kept[3])
    first = source.read(np.array([0, 3]))
    np.testing.assert_array_equal(first["image"], whole.read(np.array([kept[0], kept[3]]))["image"])


def test_every_reader_gives_the_same_batches_of_some_classes(folder, in_memory):
    memory, offsets = in_memory, open_insects(folder[0], "offsets")
    assert memory.fingerprint == offsets.fingerprint
    assert (memory.encoded, offsets.encoded) == (False, True)
    for batch, other in zip(batches(memory), batches(offsets), strict=True):
        assert set(np.unique(batch["label"])) == {0, 1} and batch["mask"].all()
        for key in batch:
            np.testing.assert_array_equal(batch[key], other[key], err_msg=key)


def test_classes_are_part_of_the_fingerprint():
    whole = make_source("digits", split="test", image_size=(8, 8))
    sources = [whole, *(keep_classes(whole, classes) for classes in ((0, 1), (1, 0), (0, 2)))]
    assert len({source.fingerprint for source in sources}) == 4


def test_a_folder_of_images(tmp_path):
    for i in range(6):
        path = tmp_path / "abc"[i % 3] / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode(smooth_image(*SIZE), "png"))
    where = {"split": "train", "image_size": SIZE, "data_dir": str(tmp_path)}
    source = make_source("folder", classes=(1, 2), **where)
    assert source.class_names == ("b", "c") and source.record_name(0).startswith("b")
    whole = make_source("folder", **where)
    names = [name for name in whole.file_names(0, whole.num_examples) if name[0] != "a"]
    assert source.file_names(1, source.num_examples) == names[1:] and source.file_names(1, 1) == []


def test_classes_that_there_are_not():
    with at_fault("data.classes"):
        make_source("digits", split="train", image_size=(8, 8), classes=(7, 12))


def test_a_split_without_these_classes(folder):
    root, labels = folder
    absent = next(label for label in (0, 1, 2) if label != labels[0])
    other = 3 - absent - labels[0]
    where = {"image_size": SIZE, "data_dir": str(root), "classes": (absent, other)}
    with at_fault("data.classes"):
        make_source("insects", split="train[:1]", **where)


def make_config(**data):
    c = base_config()
    c.data.name, c.data.image_size, c.global_batch_size = "digits", 8, 8
    c.data.classes = (4, 9)
    c.evals.test = classification(split="test", every="1 epochs")
    c.data.update(data)
    return c


def test_training_and_its_evaluators_have_the_same_classes(folder):
    root, _ = folder
    config = make_config()
    config.evals.few = fewshot(
        train_split="train", test_split="train", every="1 epochs", data_name="insects",
        data_dir=str(root),
    )  # fmt: skip
    config, sources = open_all(config)
    train, test = sources[train_split(settings_of(config).data)], _source(config, sources, "test")
    assert (config.data.num_classes, config.data.num_examples) == (2, train.num_examples)
    assert train.class_names == test.class_names == ("4", "9")
    assert _source(config, sources, "few").num_classes == 3
    again, _ = open_all(config)  # as resolved, from config.json
    assert again == config


def _source(config, sources, name):
    return sources[next(iter(splits_of(config, name).values()))]


def test_a_mixture_of_some_classes():
    config, sources = open_all(make_config(mix="digits@test=0.3"))
    whole = sources[train_split(settings_of(config).data)]
    assert whole.num_classes == 2 and whole.num_examples == sum(whole.part_sizes)
    assert np.isin(read_labels(whole, 0, whole.num_examples), (0, 1)).all()


def test_a_plan_needs_the_number_of_examples_of_some_classes():
    with at_fault("data.num_examples"):
        with_known_facts(make_config())
    config = with_known_facts(make_config(num_examples=300))
    assert (config.data.num_classes, config.data.num_examples) == (2, 300)


def open_part(size, seed=0, balanced=False, **more):
    part = (size, balanced, seed)
    return make_source("digits", split="train", image_size=(8, 8), subset=part, **more)


def records(source):
    return {
        image.tobytes() for image in source.read(np.arange(source.num_examples))["image"].numpy()
    }


@pytest.mark.parametrize("balanced", [False, True])
def test_parts_are_nested_for_every_seed(balanced):
    for seed in (0, 1):
        parts = [open_part(size, seed, balanced) for size in ("10", "5%", "300")]
        assert [part.num_examples for part in parts] == [10, 72, 300]
        small, middle, large = map(records, parts)
        assert small < middle < large
    assert records(open_part("10", 0, balanced)) != records(open_part("10", 1, balanced))
    assert parts[0].fingerprint != parts[1].fingerprint


def test_balanced_parts_have_as_many_of_each_class():
    counts = np.bincount(read_labels(open_part("203", balanced=True), 0, 203))
    assert sorted(counts) == [20] * 7 + [21] * 3
    two = open_part("30", balanced=True, classes=(3, 8))
    assert list(np.bincount(read_labels(two, 0, 30))) == [15, 15]


def test_a_part_is_trained_on_and_planned_but_not_evaluated():
    config = make_config(subset="50%", classes=None)
    found, sources = open_all(config)
    assert found.data.num_examples == with_known_facts(config).data.num_examples == 718
    assert sources[train_split(settings_of(found).data)].num_examples == 718
    (key,) = splits_of(found, "test").values()
    assert key.subset is None and sources[key].num_examples == 360


@pytest.mark.parametrize(
    "keys",
    [{"subset": "24"}, {"subset": "24", "subset_balanced": True},
     {"subset": "24", "order": "chunk", "chunk_size": 4, "streams": 2}],
    ids=str,
)  # fmt: skip
def test_epochs_of_a_part_have_all_its_records_each_in_another_order(keys):
    """The first epoch is the same however long the run lasts."""

    def epochs(duration):
        config = make_config(classes=None, **keys)
        config.duration = duration
        config, sources = open_all(config)
        settings = settings_of(config)
        source, steps = sources[train_split(settings.data)], total_steps(config)
        found = pipeline.host_batches(
            source, image_batch(8, (8, 8)), steps=range(steps), seed=config.seed,
            rows=np.arange(8), data_order=training_order(settings.data, settings.run, source),
        )  # fmt: skip
        ids = np.concatenate([batch["id"] for batch in found]).reshape(-1, 24)
        names = [source.record_name(i) for i in range(source.num_examples)]
        return [[names[i] for i in epoch] for epoch in ids], names

    ([first], names), (five, _) = epochs("1 epochs"), epochs("5 epochs")
    assert five[0] == first
    assert [sorted(epoch) for epoch in five] == [sorted(names)] * 5 and len({*names}) == 24
    assert len({tuple(epoch) for epoch in five}) == 5


def test_parts_that_there_are_not():
    with at_fault("data.subset"):
        open_part("2000")


def test_few_shot_of_classes_that_are_not_trained_on():
    config = make_config()
    config.evals.few = fewshot(
        train_split="train", test_split="test", every="1 epochs", classes=(0, 1, 2)
    )
    found, sources = open_all(config)
    keys = splits_of(found, "few")
    assert [sources[key].num_classes for key in keys.values()] == [3, 3]
