"""The sizes of public data sets that need not be there."""

import pytest
from at_fault import at_fault
from opened import with_known_facts

from vit_jax.config import SOURCES, base_config, key
from vit_jax.data import DataSet, dataset_sizes, make_source
from vit_jax.data.dataset_sizes import KNOWN_DATA, known_sizes


@pytest.mark.parametrize(
    ("split", "num_examples"),
    [
        ("train", 1_281_167),
        ("train[50000:]", 1_231_167),
        ("train[:50000]", 50_000),
        ("train[:-1000]", 1_280_167),
        ("validation[:1%]", 500),
        ("train[:10]+validation", 50_010),
    ],
)
def test_splits_are_counted_in_tfds_notation(split, num_examples):
    assert known_sizes("imagenet2012", split) == (1000, num_examples)
    assert known_sizes("imagenet2012:5.1.0", split) == (1000, num_examples)


def test_whole_splits_are_counted_without_tensorflow(monkeypatch):
    monkeypatch.setattr(dataset_sizes, "tfds", None)
    assert known_sizes("imagenet2012", "train") == (1000, 1_281_167)


@pytest.mark.parametrize(
    ("name", "split"), [("digits", "train"), ("digits", "test"), ("cifar10", "test")]
)
def test_table_agrees_with_the_data(name, split, request):
    where = {}
    if name == "cifar10":
        where = {"data_dir": request.getfixturevalue("shared_data"), "reader": "offsets"}
    source = make_source(name, split=split, image_size=(8, 8), **where)
    assert known_sizes(name, split) == (source.num_classes, source.num_examples)


def test_what_the_user_says_goes_before_the_table():
    assert known_sizes("cifar10", "train", num_classes=3) == (3, 50_000)
    assert known_sizes("cifar10", "train", num_examples=7) == (10, 7)
    assert known_sizes("mine", "any", num_classes=3, num_examples=7) == (3, 7)


def test_a_data_set_states_its_own_sizes(monkeypatch):
    class Own(DataSet):
        """Data."""

        classes_made: int = key(3, "number of classes")

        def sizes(self):
            return self.classes_made, {"train": 100}

    monkeypatch.setitem(SOURCES, "own", Own)
    assert known_sizes("own", "train") == (3, 100)
    own = {"classes_made": 5, "key_of_others": 1}
    assert known_sizes("own", "train[:10%]", own=own) == (5, 10)


def test_what_is_not_known_is_asked_for():
    with at_fault("data.num_examples"):
        known_sizes("mine", "train", num_classes=3)
    with at_fault("data.num_classes", "data.num_examples"):
        known_sizes("mine", "train")


@pytest.mark.parametrize(
    "split",
    ["val", "train[x:]", "train[99999999:]", "train[10:5]", "train[10:5]+train[:20]", "train[5:5]"],
)
def test_split_that_is_not_there_is_refused(split):
    with at_fault("data.split"):
        known_sizes("imagenet2012", split)


def test_every_known_set_has_the_split_that_is_trained_on():
    assert all("train" in splits for _, splits in KNOWN_DATA.values())


def test_sizes_of_a_config_and_of_its_mixture():
    c = base_config()
    c.data.name, c.data.split = "cifar10", "train[:50%]"
    filled = with_known_facts(c)
    assert (filled.data.num_classes, filled.data.num_examples) == (10, 25_000)
    assert c.data.num_examples is None  # the user's own stays as it is
    c.data.mix = "digits@train=0.3, cifar100=0.2"
    assert with_known_facts(c).data.num_examples == 25_000 + 1_437 + 25_000
    c.data.subset = "1000"  # of data.name only
    assert with_known_facts(c).data.num_examples == 1_000 + 1_437 + 25_000
    c.data.num_examples, c.data.subset = 7, None
    assert with_known_facts(c).data.num_examples == 7
