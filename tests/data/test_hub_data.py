"""`hf:OWNER/NAME`: Parquet files of the Hub, from a server of this machine."""

import pytest
from at_fault import at_fault
from fake_hub import COMMITS, move_hub, served
from images import encode, smooth_image
from read_settings import data_and_evals, settings_of
from table_files import make_table, write_parquet

from vit_jax.config import SOURCES
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.data import make_source, read_labels
from vit_jax.data.division import Divider
from vit_jax.run.setup.sources import open_training, settle_names

IMAGES = [encode(smooth_image(16, 16, seed)) for seed in range(4)]


def parquet(tmp_path, labels):
    table = make_table(IMAGES, labels, ("cat", "dog"))
    return write_parquet(table, tmp_path / "table.parquet").read_bytes()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    labels = [0, 1, 0, 1], [0, 0, 0, 1], [1, 1, 0, 0]
    one, two, other = (parquet(tmp_path, of_file) for of_file in labels)
    main, readme = COMMITS["main"], {"README.md": b"pets"}
    numbered = {f"data/train-0000{i}-of-00002.parquet": t for i, t in enumerate((one, two))}
    repositories = {
        ("datasets/org/pets", main): {**readme, **numbered, "data/validation.parquet": other},
        ("datasets/org/pets", COMMITS["older"]): {"default/train/0000.parquet": other},
        ("datasets/org/two", main): {"a/train.parquet": one, "b/train.parquet": other},
        ("datasets/org/none", main): {**readme, "train.zip": b"zip"},
    }
    with served(repositories, monkeypatch, tmp_path) as hub:
        yield hub


def open_hub(name, split="train"):
    return make_source(name, split=split, image_size=(16, 16))


def labels_of(name, split="train"):
    source = open_hub(name, split)
    return read_labels(source, 0, source.num_examples).tolist()


def fetched(hub):
    return sorted(file for method, file in hub.asked if method == "GET" and "parquet" in file)


def test_only_the_splits_that_are_read_are_fetched_and_once(hub, monkeypatch):
    source = open_hub("hf:org/pets")
    train = [f"data/train-0000{i}-of-00002.parquet" for i in range(2)]
    assert fetched(hub) == train
    assert (source.class_names, source.num_examples) == (("cat", "dog"), 8)
    assert labels_of("hf:org/pets", "val") == [1, 1, 0, 0]
    assert fetched(hub) == [*train, "data/validation.parquet"]
    assert labels_of("hf:org/pets@older") == [1, 1, 0, 0]
    assert labels_of("hf:org/two/b") == [1, 1, 0, 0]
    move_hub(monkeypatch, "http://127.0.0.1:9")
    assert open_hub("hf:org/pets").fingerprint == source.fingerprint


def test_a_run_keeps_the_commit_that_it_began_with(hub):
    config = load_config("folder")
    keys = {"data.name": "hf:org/pets", "evals.val.data_name": "hf:org/pets@older"}
    assert apply_overrides(config, [*keys.items(), ("data.image_size", "16")]) == []
    main, older = (f"hf:org/pets@{COMMITS[name]}" for name in ("main", "older"))
    assert settle_names(*data_and_evals(config)) == {
        "data.name": main,
        "evals.val.data_name": older,
    }
    config.data.name = main
    asked = len(hub.asked)
    assert SOURCES.find(main).settle(main) == main
    assert hub.asked[asked:] == []
    facts, _ = open_training(settings_of(config), divider=Divider(anew=True))
    assert (facts["data.num_examples"], facts["data.chunk_size"]) == (8, 64)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("hf:org/gated", "terms"),
        ("hf:org/unknown", "does not exist"),
        ("hf:org/pets@v9", "no revision 'v9'"),
        ("hf:org/none", "refs/convert/parquet"),
        ("hf:org/two", "hf:org/two/a, hf:org/two/b"),
        ("hf:org/two/c", "hf:org/two/a, hf:org/two/b"),
        ("hf:org/down", "cannot be fetched ("),
        ("hf:pets", "needed: hf:OWNER/NAME"),
    ],
)
def test_refusals_name_the_data_set_and_why(hub, name, why):
    with at_fault("data.name") as error:
        open_hub(name)
    assert repr(name) in str(error.value) and why in str(error.value)
