"""A run with captions: its tokenizer, which it keeps, and what its parts know of it."""

import re
import shutil

import jax
import numpy as np
import pytest
from asked import count_steps, prepare, train_and_evaluate
from at_fault import at_fault
from etils import epath

from vit_jax.checkpoints import restore
from vit_jax.config import Settings
from vit_jax.config.stored import read_stored
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.data.captions import digest_of, kept_tokenizer
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.data.sources import arrays
from vit_jax.data.tokenizers import SIZE, TextFacts
from vit_jax.diagnosis.benchmarks.step import made_up_batch
from vit_jax.objectives.supervised import Supervised
from vit_jax.run import loop
from vit_jax.run.setup.branch import branch
from vit_jax.run.setup.validation import validate

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")
RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.integers(0, 256, (64, 8, 8, 3), np.uint8), np.arange(64) % 10
CAPTIONS = [[f"class {label}", f"a picture of {label}"] for label in LABELS]


def make_config(**overrides):
    config = load_config("quickstart:debug")
    overrides = {"data__text_length": 8, "duration": "4 steps", "schedule__warmup": "0 steps",
                 "checkpoint__every": "2 steps"} | overrides  # fmt: skip
    faults = apply_overrides(config, [(k.replace("__", "."), str(v)) for k, v in overrides.items()])
    assert not faults
    return config


def given(captions=CAPTIONS):
    split = {"image": IMAGES, "label": LABELS, "caption": captions}
    return arrays.give({"train": split, "test": split})


def run(workdir, captions=CAPTIONS, make=train_and_evaluate, **overrides):
    with given(captions) as chosen:
        names = {key.replace(".", "__"): value for key, value in chosen.items()}
        return make(make_config(**names | overrides), workdir)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("told") / "run"
    run(workdir)
    return workdir


def test_a_run_keeps_its_tokenizer_and_says_its_digest(workdir):
    stored = read_stored(epath.Path(workdir))
    resolved, by = stored.resolved.data, stored.decided_by
    files = kept_tokenizer(epath.Path(workdir), Settings.read(stored.resolved).data)
    assert resolved.vocabulary_digest == digest_of(files.contents)
    assert resolved.vocabulary == files.read().vocabulary < 100
    assert {by["data.vocabulary"], by["data.vocabulary_digest"]} == {"data"}
    assert stored.asked.data.vocabulary is None


def types_of(batch):
    return {name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()}


def test_its_parts_know_the_tokenizer(workdir, golden, monkeypatch):
    facts, bind = [], Supervised.bind

    def noted(self, model, loss, known):
        facts.append(known)
        return bind(self, model, loss, known)

    monkeypatch.setattr(Supervised, "bind", noted)
    sizes = "8, 12 at 50 %"  # two stages
    clip = golden / "tokenizer_clip"
    how = {"data__image_size": sizes, "data__tokenizer": clip}
    made = run(workdir.with_name("none"), make=prepare, **how)
    tokenizer = made.train_source.tokenizer
    assert tokenizer.facts == TextFacts(929, 8, end_id=928, pad_id=928)
    assert {known.text for known in facts} == {tokenizer.facts}
    assert all(each.batch.text == tokenizer.facts for each in made.experiments)
    (evaluated,) = (each for key, each in made.sources.items() if key.split == "test")
    assert [*evaluated.captions([5, 0])] == [CAPTIONS[5], CAPTIONS[0]]
    batch = made.experiment.abstract_batch
    size = made.settings.run.global_batch_size
    assert (batch["text"].shape, batch["text_mask"].shape) == ((size, 8), (size,))
    with jax.set_mesh(made.mesh):
        first = next(made.batches(range(1)))
    assert types_of(first) == types_of(made.earlier[0].abstract_batch)
    assert types_of(made_up_batch(made.experiment, 10)) == types_of(batch)
    for ids, record in zip(np.asarray(first["text"]), np.asarray(first["id"]), strict=True):
        assert any(np.array_equal(ids, tokenizer([text])[0]) for text in CAPTIONS[record])


def test_a_plan_takes_a_tokenizer_of_the_stated_size():
    planned = parse_preprocessing(Settings.of(make_config())).text
    assert planned == TextFacts(SIZE, 8, end_id=1, pad_id=1, pads_left=False)
    chosen = make_config(data__vocabulary=500)
    assert parse_preprocessing(Settings.of(chosen)).text.vocabulary == 500


@pytest.mark.slow
def test_it_goes_on_only_with_its_tokenizer_and_its_captions(
    workdir, tmp_path, golden, monkeypatch, caplog
):
    monkeypatch.setattr(loop, "compile_step", count_steps())
    again = shutil.copytree(workdir, tmp_path / "run")
    copy = shutil.copytree(workdir / "tokenizer", tmp_path / "copy")
    where = {"data__tokenizer": copy}  # its place may change
    made = run(again, make=prepare, **where)
    assert made.fingerprint == run(again, make=prepare).fingerprint
    assert made.fingerprint != run(again, [["a"]] * 64, make=prepare).fingerprint
    new = tmp_path / "none"
    assert made.fingerprint == run(new, make=prepare).fingerprint
    assert made.fingerprint != run(new, make=prepare, data__text_length=9).fingerprint
    with at_fault("data.tokenizer"):
        run(again, make=prepare, data__tokenizer=golden / "tokenizer_siglip")
    with at_fault("data.text_length"):
        run(again, make=prepare, data__text_length=9)
    named = tmp_path / "named"
    run(named, **where)
    copy.rename(tmp_path / "elsewhere")
    run(named, make=prepare, **where)  # it has its own
    (tmp_path / "elsewhere").rename(copy)
    shutil.rmtree(again / "tokenizer")
    with at_fault("data.tokenizer"):
        run(again, make=prepare)
    run(again, make=prepare, **where)
    wrong = [*CAPTIONS[:-1], [b"\xff"]]
    caplog.set_level("INFO", "vit_jax")
    run(tmp_path / "new", wrong)
    assert re.search(
        rf"captions: 8 tokens each, of the \d+ in {tmp_path}/new/tokenizer", caplog.text
    )
    assert caplog.text.count(" train: 1 not UTF-8 (item 63 of train); images") == 1


def test_a_resumed_run_ends_as_an_unbroken_one_and_a_branch_has_the_tokenizer(workdir, tmp_path):
    again = shutil.copytree(workdir, tmp_path / "run")
    shutil.rmtree(again / "checkpoints/4")
    (again / "summary.json").unlink()
    run(again)
    ends = [restore.read_meta(epath.Path(path) / "checkpoints/4") for path in (workdir, again)]
    assert ends[0]["checksums"] == ends[1]["checksums"]
    branch(str(workdir), str(tmp_path / "branch"), "constant", {"duration": "6 steps"})
    for file in (workdir / "tokenizer").iterdir():
        assert (tmp_path / "branch/tokenizer" / file.name).read_bytes() == file.read_bytes()


def test_keys_that_make_no_sense_together_are_refused():
    for key, overrides in {
        "data.tokenizer": {"data__text_length": None, "data__tokenizer": "words"},
        "data.text_length": {"data__ops": "mixup(0.2)"},
    }.items():
        with at_fault(key):
            validate(make_config(**overrides), [], "")
