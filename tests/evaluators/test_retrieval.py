"""Recall by hand, in parts and with ties, and the evaluator on images with several captions."""

import numpy as np
import pytest
from pairs import clip, siglip

import vit_jax
from vit_jax.base.errors import InputError
from vit_jax.evaluators import retrieval
from vit_jax.evaluators.retrieval import recalls

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")

RNG = np.random.default_rng(0)


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def by_sorting(x_NE, t_ME, image_M):
    cosines = x_NE @ t_ME.T
    found = {}
    for k in (1, 5, 10):
        rows = np.argsort(-cosines, axis=1)[:, :k]
        found[f"image_to_text_recall{k}"] = np.mean(
            [i in image_M[row] for i, row in enumerate(rows)]
        )
        columns = np.argsort(-cosines, axis=0)[:k]
        found[f"text_to_image_recall{k}"] = np.mean((columns == image_M).any(axis=0))
    return found


@pytest.mark.parametrize("at_once", [1 << 24, 300, 1])
def test_recall_is_that_of_the_whole_matrix(monkeypatch, at_once):
    monkeypatch.setattr(retrieval, "_PAIRS", at_once)
    image_M = RNG.permutation(np.concatenate([np.arange(40), RNG.integers(0, 40, 60)]))
    x_NE = unit(RNG.standard_normal((40, 8)))
    t_ME = unit(x_NE[image_M] + 0.6 * RNG.standard_normal((100, 8)))
    found = recalls(x_NE, t_ME, image_M)
    assert found == pytest.approx(by_sorting(x_NE, t_ME, image_M))
    assert 0.1 < found["text_to_image_recall1"] < found["text_to_image_recall10"] < 1


def test_equal_features_have_the_recall_of_chance():
    same = unit(np.tile(RNG.normal(size=512), (50, 1))).astype(np.float32)
    found = recalls(same, same, np.arange(50))
    assert found == pytest.approx({
        f"{way}_recall{k}": k / 50
        for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)
    })  # fmt: skip


@pytest.mark.parametrize("of_images", [True, False])
def test_features_that_are_not_numbers_find_nothing(of_images):
    x_NE, nan = unit(RNG.standard_normal((20, 8))), np.full((20, 8), np.nan)
    found = recalls(*((nan, x_NE) if of_images else (x_NE, nan)), np.arange(20))
    assert {*found.values()} == {0.0}
    one = x_NE.copy()
    one[3] = np.nan
    found = recalls(*((one, x_NE) if of_images else (x_NE, one)), np.arange(20))
    assert {*found.values()} == {19 / 20}


def data_of(captions):
    pixels = RNG.integers(0, 256, (len(captions), 64, 64, 3), np.uint8)
    return {"test": {"image": pixels, "caption": captions}}


@pytest.mark.parametrize("make", [clip, pytest.param(siglip, marks=pytest.mark.slow)])
def test_a_model_with_both_towers_is_evaluated(golden, tmp_path, make):
    source = make(golden, tmp_path / "pair")
    captions = [
        ["a red dog", "an ant"],
        ["a car"],
        [],
        ["a boat on a lake", "sea", "blue"],
        ["..."],
    ]
    data = data_of(captions)
    found = vit_jax.evaluate(source, "evaluate:retrieval", {"global_batch_size": 8}, data=data)
    pretrained = vit_jax.read_pretrained(source)
    side = pretrained.read_text_side()
    tokenizer = side.read_tokenizer()
    usable = [[c for c in row if tokenizer.ids_of(c)] for row in captions]
    kept = [i for i, row in enumerate(usable) if row]
    x = vit_jax.predict(data["test"]["image"][kept], pretrained, output="features")
    images = side.matcher.apply(side.variables, x, method="image_features")
    ids = tokenizer([c for row in usable for c in row])
    texts = side.matcher.apply(side.variables, ids, method="text_features")
    image_M = np.repeat(np.arange(len(kept)), [len(usable[i]) for i in kept])
    ranks = by_sorting(unit(np.asarray(images)), unit(np.asarray(texts)), image_M)
    expected = {"num_images": len(kept), "num_texts": len(ids)} | ranks
    assert found == pytest.approx({f"retrieval/{k}": v for k, v in expected.items()})


def test_what_it_needs(golden, tmp_path):
    small = {"global_batch_size": 8}
    with pytest.raises(InputError, match=r"evals.retrieval.split: .* test has no captions; add"):
        plain = {"test": (RNG.integers(0, 256, (3, 64, 64, 3), np.uint8), [0, 1, 0])}
        vit_jax.evaluate(siglip(golden, tmp_path / "a"), "evaluate:retrieval", small, data=plain)
    data = data_of([["a dog"]])
    with pytest.raises(
        InputError, match=r"evals.retrieval.type='retrieval': the model has no text"
    ):
        vit_jax.evaluate(golden / "hf_vit", "evaluate:retrieval", small, data=data)
    with pytest.raises(InputError, match=r"split: no image that can be read has a caption"):
        vit_jax.evaluate(tmp_path / "a", "evaluate:retrieval", small, data=data_of([["..."], [""]]))
