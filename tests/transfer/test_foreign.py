"""Files of Hugging Face and timm: goldens, their round trip, and what is told of them."""

import functools
import json
import logging
import mmap
import pathlib
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from at_fault import at_fault, golden_page
from published import random_model
from safetensors.numpy import load_file, save_file
from scipy.special import erf

import vit_jax
from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.config import POSITIONS
from vit_jax.models.deit import DeiT
from vit_jax.models.gelu import GELU
from vit_jax.models.position import NoPositions
from vit_jax.transfer import (
    load_pretrained,
    pretrained_spec,
    read_pretrained,
    save_pretrained,
    tensors,
)
from vit_jax.transfer.pretrained import ops_for

METHODS = {"logits": "__call__", "features": "features", "tokens": "tokens", "pooled": "pre_logits"}
# Source, what was computed from it, the format that it is written in.
GOLDENS = {
    "hf_vit": ("hf_vit", "hf_vit/io.npz", "hf"),
    "hf_vit_backbone": ("hf_vit_backbone", "hf_vit_backbone/io.npz", "hf"),
    "hf_deit": ("hf_deit", "hf_deit/io.npz", "hf"),
    "timm_vit": ("timm_vit.safetensors", "timm_vit.io.npz", "timm"),
    "timm_vit_gap": ("timm_vit_gap.safetensors", "timm_vit_gap.io.npz", "timm"),
    "vit_finetuned": ("vit_finetuned.npz", "vit_finetuned.io.npz", "npz"),
    "vit_pretrained": ("vit_pretrained.npz", "vit_pretrained.io.npz", "npz"),
    "vit_v2_gap": ("vit_v2_gap.npz", "vit_v2_gap.io.npz", "npz_v2"),
    "vit_v2_map": ("vit_v2_map.npz", "vit_v2_map.io.npz", "npz_v2"),
    "hybrid_root": ("hybrid_root.npz", "hybrid_root.io.npz", "npz"),
    "hybrid_resnet": ("hybrid_resnet.npz", "hybrid_resnet.io.npz", "npz"),
    "bit": ("bit.npz", "bit.io.npz", "npz"),
}


RESNETS = ("hybrid_root", "hybrid_resnet", "bit")  # compared in test_resnet.py
RESAMPLED = ("hf_vit", "hf_deit", "timm_vit")  # compared at another size


@functools.partial(jax.jit, static_argnums=(0, 3))
def apply(model, variables, images, method="__call__"):
    return model.apply(variables, images, method=method)


def assert_close(ours, expected, tolerance=1e-4):
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        *((name, "") for name in GOLDENS if name not in (*RESNETS, *RESAMPLED)),
        *((name, "_resampled") for name in RESAMPLED),
        *(pytest.param(name, "_resampled", marks=pytest.mark.slow)
          for name in ("hf_vit_backbone", "timm_vit_gap")),
        *(pytest.param(name, "", marks=pytest.mark.slow) for name in RESAMPLED),
    ],
)  # fmt: skip
def test_goldens(golden, name, suffix):
    source, io, _ = GOLDENS[name]
    with np.load(golden / io) as expected:
        images = expected["image" + suffix]
        size = images.shape[1:3] if suffix else None
        model, variables = load_pretrained(golden / source, image_size=size)
        assert model.image_size == images.shape[1:3]
        compared = [key for key in METHODS if key + suffix in expected]
        assert {"logits", "features"} & set(compared)
        # The features are those of the logits; tests/models/test_vit.py compares the methods.
        compared = compared[:1] if "logits" in compared else compared
        for key in compared:
            assert_close(apply(model, variables, images, METHODS[key]), expected[key + suffix])


def read_arrays(path):
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return dict(arrays)
    return load_file(path / "model.safetensors" if path.is_dir() else path)


def keys_of(config):
    """Of a JSON object, those within objects included, but for the names of classes."""
    named = ("id2label", "label2id")
    return {
        key if not isinstance(value, dict) or key in named else (key, inner)
        for key, value in config.items()
        for inner in (value if isinstance(value, dict) and key not in named else [None])
    }


@pytest.mark.parametrize("name", GOLDENS)
def test_a_golden_is_written_bit_for_bit(golden, tmp_path, name):
    source, _, format = GOLDENS[name]
    target = tmp_path / "made" / source
    pretrained = read_pretrained(golden / source)
    model, variables = load_pretrained(golden / source, scan=True)
    save_pretrained(target, model, variables, format, pretrained.spec)
    ours, theirs = read_arrays(target), read_arrays(golden / source)
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        assert (ours[key].dtype, ours[key].shape) == (array.dtype, array.shape)
        assert ours[key].tobytes() == array.tobytes()
    again = read_pretrained(target)
    assert again.model == pretrained.model
    assert again.spec == pretrained.spec
    if format == "hf":
        stated = json.loads((golden / source / "config.json").read_text())
        assert json.loads((target / "config.json").read_text()) == stated
    if format == "timm":
        stated = json.loads((golden / source).with_suffix(".json").read_text())
        written = json.loads(target.with_suffix(".json").read_text())
        assert keys_of(stated) <= keys_of(written)
        for key in ("num_classes", "model_args", "pretrained_cfg"):
            value = written[key]
            assert value == (value | stated[key] if isinstance(value, dict) else stated[key])


def make(format, tmp_path, **fields):
    """(path, model, variables) of a file with random weights."""
    model, variables = random_model(**fields)
    path = tmp_path / ("made.npz" if format.startswith("npz") else "made")
    save_pretrained(path, model, variables, format)
    return path, model, variables


TOKEN = {"gelu": "exact", "norm_eps": 1e-3}
OTHERS = {
    "hf, non-square patches": ("hf", {"patch_size": (2, 6), **TOKEN}),
    "hf, no biases in q, k, v": ("hf", {"qkv_bias": False, **TOKEN}),
    "hf, DeiT with one head": ("hf", {"name": "DeiT-mu/4", "distillation_head": False}),
    "hf, DeiT without a head": ("hf", {"name": "DeiT-mu/4", "num_classes": None}),
    "timm, 11 layers": ("timm", {"depth": 11, "width": 8, "mlp_dim": 9, "num_heads": 4, **TOKEN}),
    "timm, fc_norm": ("timm", {"pool": "gap", "norm_pooled": True}),
    "timm, fc_norm, class token": (
        "timm", {"pool": "gap", "norm_pooled": True, "class_token": True},
    ),
    "timm, class token left out": ("timm", {"pool": "gap", "class_token": True}),
    "timm, class token without position": ("timm", {"pos_embed_class_token": False}),
    "timm, attention pooling": ("timm", {"pool": "map", "gelu": "exact"}),
    "timm, layer scale": ("timm", {"layer_scale": 0.1, "num_classes": None}),
    "timm, DeiT": ("timm", {"name": "DeiT-mu/4"}),
    "npz, mean-pooled": ("npz", {"pool": "gap", "hidden_head": True}),
    "npz_v2, class token": ("npz_v2", {"pos_embed_class_token": False}),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_other_shapes_are_read_as_they_were_written(tmp_path, case):
    format, fields = OTHERS[case]
    path, model, variables = make(format, tmp_path, **fields)
    loaded, found = load_pretrained(path)
    default = {"class_token": None} if model.class_token == loaded.class_token else {}
    assert loaded.clone(**default) == model.clone(**default)
    jax.tree.map(np.testing.assert_array_equal, found, variables)
    assert isinstance(loaded, DeiT) == case.startswith(("hf, DeiT", "timm, DeiT"))


def test_a_file_of_fixed_positions_tells_its_images_size(tmp_path):
    fields = {"pos_embed": "sincos_2d", "pool": "gap"}
    path, model, _ = make("npz_v2", tmp_path, **fields)
    assert load_pretrained(path)[0] == model.clone(image_size=None)
    assert pretrained_spec(path).image_size == (8, 12)


@pytest.mark.parametrize(
    ("format", "fields"),
    [
        ("hf", {"pos_embed": "sincos_2d"}),
        ("hf", {"pos_embed": "none"}),
        ("hf", {"pos_embed": "my_none"}),
        ("hf", {"pos_embed_class_token": False}),
        ("hf", {"pos_embed": "learned_2d"}),
        ("timm", {"pos_embed": "sincos_2d", "pool": "gap"}),
        ("timm", {"pos_embed": "learned_2d", "pos_embed_class_token": False}),
    ],
)
def test_positions_that_a_format_knows_not_become_a_table(
    tmp_path, caplog, monkeypatch, format, fields
):
    monkeypatch.setitem(POSITIONS, "my_none", NoPositions)
    caplog.set_level(logging.INFO, "vit_jax")
    path, model, variables = make(format, tmp_path, depth=1, **fields)
    loaded, found = load_pretrained(path)
    assert loaded.pos_embed == "learned_1d"
    assert "positions: " in caplog.text
    images = np.random.default_rng(1).uniform(-1, 1, (2, 8, 12, 3)).astype(np.float32)
    assert_close(apply(loaded, found, images), apply(model, variables, images), 1e-5)


@pytest.mark.parametrize("format", ["hf", "timm"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_are_widened(tmp_path, format, dtype):
    path, _, variables = make(format, tmp_path)
    file = path / "model.safetensors"
    save_file({name: a.astype(dtype) for name, a in load_file(file).items()}, file)
    _, found = load_pretrained(path)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(dtype).astype(np.float32)),
        found, variables,
    )  # fmt: skip


def test_a_folder_of_shards(golden, tmp_path):
    whole = load_file(golden / "hf_vit" / "model.safetensors")
    names = sorted(whole)
    parts = {"model-1-of-2.safetensors": names[:20], "model-2-of-2.safetensors": names[20:]}
    for file, part in parts.items():
        save_file({name: whole[name] for name in part}, tmp_path / file)
    places = {name: file for file, part in parts.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    shutil.copy(golden / "hf_vit" / "config.json", tmp_path)
    expected = load_pretrained(golden / "hf_vit")
    model, variables = load_pretrained(tmp_path)
    assert model == expected[0]
    jax.tree.map(np.testing.assert_array_equal, variables, expected[1])


def test_large_weights_are_written_in_shards(tmp_path, monkeypatch):
    model, variables = random_model("ViT-mu/4", gelu="exact")
    save_pretrained(tmp_path / "whole", model, variables, "hf")
    monkeypatch.setattr(tensors, "SHARD_SIZE", "20KB")
    of_timm = save_pretrained(tmp_path / "timm", model, variables, "timm")
    assert of_timm == ["config.json", "model.safetensors"]  # timm reads one file only
    files = save_pretrained(tmp_path / "shards", model, variables, "hf")
    whole = load_file(tmp_path / "whole/model.safetensors")
    index = json.loads((tmp_path / "shards/model.safetensors.index.json").read_text())
    shards = [name for name in files if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert {*shards} == {*index["weight_map"].values()}
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in whole.values())
    for shard in shards:
        part = load_file(tmp_path / "shards" / shard)  # the library's own reader
        assert len(part) == 1 or sum(array.nbytes for array in part.values()) <= 20_000
        for name, array in part.items():
            assert index["weight_map"][name] == shard
            np.testing.assert_array_equal(whole.pop(name), array, strict=True)
    assert not whole
    _, found = load_pretrained(tmp_path / "shards")
    _, expected = load_pretrained(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    monkeypatch.undo()
    file = tmp_path / "whole/model.safetensors"
    written = file.read_bytes()
    save_file(load_file(file), file, metadata={"format": "pt"})
    assert file.read_bytes() == written  # the bytes of the library's own writer


def test_arrays_are_read_when_they_are_used(golden):
    """From the file itself: no memory of this process holds them."""
    found = read_pretrained(golden / "hf_vit")
    for name, array in found.params.items():
        if name == "embedding/kernel":  # whose axes are merged
            continue
        while isinstance(array, np.ndarray):
            array = array.base
        assert isinstance(array.obj, mmap.mmap), name


def test_a_distributed_checkpoint_is_named(tmp_path):
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    (tmp_path / ".metadata").write_bytes(b"")
    for path in (tmp_path, tmp_path / "__0_0.distcp"):
        with pytest.raises(InputError, match="a distributed checkpoint of PyTorch"):
            load_pretrained(path)


@pytest.mark.parametrize("format", ["hf", "timm"])
def test_without_a_config_what_is_assumed_is_said(tmp_path, caplog, format):
    caplog.set_level(logging.INFO, "vit_jax")
    fields = {"gelu": "exact", "norm_eps": 1e-12 if format == "hf" else 1e-6, "image_size": 8}
    path, model, _ = make(format, tmp_path, width=192, num_heads=3, **fields)
    (path / "config.json").unlink()
    assert load_pretrained(path)[0] == model
    assert "num_attention_heads=3" in caplog.text or "num_heads=3" in caplog.text
    path, _, _ = make(format, tmp_path / "other", width=24)
    (path / "config.json").unlink()
    with pytest.raises(InputError, match="no published ViT is 24 wide"):
        load_pretrained(path)


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_absent_arguments_of_timm_have_its_defaults(tmp_path):
    path, model, _ = make("timm", tmp_path, width=24, num_heads=12, pool="gap", norm_pooled=True,
                          class_token=True, gelu="exact")  # fmt: skip
    config = path / "config.json"
    change_json(config, architecture="vit", model_args={"global_pool": "avg", "img_size": [8, 12]})
    assert load_pretrained(path)[0] == model
    change_json(config, model_args={"global_pool": "avg", "fc_norm": False})
    with at_fault("fc_norm"):
        load_pretrained(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"pool": "gap"},
        {"pool": "map"},
        {"pool": "gap", "class_token": True, "norm_pooled": True},
        {"pos_embed_class_token": False},
    ],
    ids=["mean-pooled", "attention-pooled", "fc_norm", "class token without position"],
)
def test_of_a_named_architecture_the_arrays_tell_the_arguments(tmp_path, caplog, fields):
    caplog.set_level(logging.INFO, "vit_jax")
    fields = {"gelu": "exact", "width": 192, "num_heads": 3, "image_size": 8} | fields
    path, model, _ = make("timm", tmp_path, **fields)
    config = json.loads((path / "config.json").read_text())
    del config["model_args"]
    (path / "config.json").write_text(json.dumps(config))
    assert load_pretrained(path)[0] == model
    assert "assuming act_layer='gelu', num_heads=3, which" in caplog.text


def test_what_a_folder_tells_beside_the_model(tmp_path):
    path, _, _ = make("hf", tmp_path)
    names = {str(i): name for i, name in enumerate("abcde")}
    change_json(path / "config.json", id2label=names)
    change_json(path / "preprocessor_config.json", image_mean=[0.1, 0.2, 0.3])
    spec = vit_jax.pretrained_spec(path)
    assert spec.class_names == tuple("abcde")
    assert (spec.image_size, spec.mean, spec.std) == ((8, 12), (0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    assert spec.resize == "half_pixel"


# What is stated of images, and the ops of timm 1.0.31 (pretrained_cfg, 32 x 48 pixels; pinned by
# test_interop) and of transformers 5.23.0 (preprocessor_config.json, 32 x 32), or the refusal.
STATED = golden_page(pathlib.Path(__file__).with_name("stated_pixels.txt"))


def stated_of(kind):
    """Parametrize with each (what is stated, answer) of that kind."""
    cases = [key.partition(": ")[2] for key in STATED if key.startswith(kind)]
    answers = [answer for key, answer in STATED.items() if key.startswith(kind)]
    return pytest.mark.parametrize(
        ("stated", "answer"), [*zip(map(json.loads, cases), answers, strict=True)], ids=cases
    )


@stated_of("timm")
def test_images_are_cut_as_timm_states(tmp_path, stated, answer):
    size = stated.get("input_size", [3, 32, 48])
    path, _, _ = make("timm", tmp_path, image_size=tuple(size[1:]), depth=1)
    imagenet = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    for flat in (False, True):  # as timm's older files are
        content = {"architecture": "vit"} | (stated if flat else {"pretrained_cfg": stated})
        args = {"img_size": size[1:], "patch_size": 4, "num_heads": 2}
        (path / "config.json").write_text(json.dumps(content | {"model_args": args}))
        spec = pretrained_spec(path)
        assert ops_for(spec) == f"decode|{answer}"
        assert (spec.mean, spec.std) == imagenet


@stated_of("transformers")
def test_images_are_cut_as_transformers_states(golden, tmp_path, stated, answer):
    path = shutil.copytree(golden / "hf_vit", tmp_path / "vit")
    (path / "preprocessor_config.json").write_text(json.dumps(stated))
    source = read_pretrained(path)
    assert ops_for(source.spec) == f"decode|{answer}"
    variables = {"params": tree.unflatten_names(source.params)}
    save_pretrained(tmp_path / "made", source.model, variables, "hf", source.spec)
    assert pretrained_spec(tmp_path / "made") == source.spec
    written = json.loads((tmp_path / "made/preprocessor_config.json").read_text())
    assert "ops" not in written  # the library's own keys say it all


def test_pixels_are_scaled_as_transformers_states(golden, tmp_path):
    path = shutil.copytree(golden / "hf_vit", tmp_path / "vit")
    for stated, black, white in (
        ({}, -1.0, 1.0),
        ({"rescale_factor": 1 / 127.5}, -1.0, 3.0),
        ({"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [127.5] * 3}, -1.0, 1.0),
        ({"image_mean": 0.25, "image_std": 0.25}, -1.0, 3.0),
        ({"do_normalize": False}, 0.0, 1.0),
        ({"do_normalize": False, "do_rescale": False}, 0.0, 255.0),
    ):
        (path / "preprocessor_config.json").write_text(json.dumps(stated))
        spec = pretrained_spec(path)
        assert -spec.mean[0] / spec.std[0] == pytest.approx(black)
        assert (1 - spec.mean[0]) / spec.std[0] == pytest.approx(white)


@stated_of("refused")
def test_preprocessing_that_cannot_be_held_is_refused_for_images(
    golden, tmp_path, caplog, stated, answer
):
    path = shutil.copytree(golden / "hf_vit", tmp_path / "vit")
    (path / "preprocessor_config.json").write_text(json.dumps(stated))
    source = read_pretrained(path)
    expected = read_pretrained(golden / "hf_vit")
    jax.tree.map(np.testing.assert_array_equal, source.params, expected.params)
    assert answer in caplog.text and "only the weights can be used" in caplog.text
    for spec in (source.spec, source.spec.at((64, 64))):
        with at_fault("init_from"):
            ops_for(spec)


@pytest.mark.parametrize("mode", [{"crop_mode": "border"}, {"interpolation": "lanczos"},
                                  {"crop_pct": 1.1}])  # fmt: skip
def test_what_timm_states_and_cannot_be_held_is_refused(golden, tmp_path, mode):
    shutil.copy(golden / "timm_vit.safetensors", tmp_path)
    content = json.loads((golden / "timm_vit.json").read_text())
    content["pretrained_cfg"] |= mode
    (tmp_path / "timm_vit.json").write_text(json.dumps(content))
    (key,) = mode
    with at_fault(key):
        read_pretrained(tmp_path / "timm_vit.safetensors")


@pytest.mark.parametrize(
    ("act", "formula"),
    [("gelu_python", lambda x: x * 0.5 * (1 + erf(x / np.sqrt(2)))),
     ("gelu_fast", lambda x: 0.5 * x * (1 + np.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x)))),
     ("gelu_accurate",
      lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
     ("swish", lambda x: x / (1 + np.exp(-x)))],
)  # fmt: skip
def test_other_words_of_transformers_for_an_activation(golden, tmp_path, act, formula):
    """By the formulas of its ACT2FN; a mask token, which no tower uses, is left out."""
    path = shutil.copytree(golden / "hf_vit", tmp_path / "vit")
    change_json(path / "config.json", hidden_act=act)
    arrays = load_file(path / "model.safetensors")
    token = {"vit.embeddings.mask_token": np.ones((1, 1, 32), np.float32)}
    save_file(arrays | token, path / "model.safetensors", metadata={"format": "pt"})
    x = np.linspace(-6, 6, 999)
    activation = GELU[read_pretrained(path).model.gelu]
    np.testing.assert_allclose(
        activation(x.astype(np.float32), None, None, 0.0), formula(x), atol=1e-6
    )


def test_the_loss_that_transformers_states(golden, tmp_path):
    path = shutil.copytree(golden / "hf_vit", tmp_path / "vit")
    assert pretrained_spec(path).loss is None
    for problem, loss in (("single_label", "softmax"), ("multi_label", "sigmoid")):
        change_json(path / "config.json", problem_type=f"{problem}_classification")
        assert pretrained_spec(path).loss == loss
    change_json(path / "config.json", problem_type="regression")
    with at_fault("problem_type"):
        read_pretrained(path)


def test_the_convention_may_be_chosen(golden, caplog):
    caplog.set_level(logging.INFO, "vit_jax")
    made = [
        load_pretrained(golden / "hf_vit", image_size=(48, 40), resize=resize)[1]["params"]
        for resize in (None, "half_pixel", "corner_aligned")
    ]
    default, same, other = (params["pos_embedding"] for params in made)
    np.testing.assert_array_equal(default, same)
    assert np.abs(default - other).max() > 0.01
    assert "resampled (corner_aligned) from a grid of (4, 4) to (6, 5)" in caplog.text
    with at_fault("resize"):
        load_pretrained(golden / "hf_vit", resize="half-pixel")


def test_a_file_in_a_folder_is_read_with_the_folder_s_config(golden):
    folder, alone = (load_pretrained(golden / s) for s in ("hf_vit", "hf_vit/model.safetensors"))
    assert folder[0] == alone[0] and folder[0].norm_eps == 1e-12


@pytest.mark.parametrize("name", ["hf_vit", "timm_vit"])
def test_what_is_assumed_is_a_warning(golden, tmp_path, caplog, name):
    file = {"hf_vit": "hf_vit/model.safetensors", "timm_vit": "timm_vit.safetensors"}[name]
    shutil.copy(golden / file, tmp_path / "alone.safetensors")
    load_pretrained(tmp_path / "alone.safetensors")
    (record,) = [r for r in caplog.records if "; assuming " in r.message]
    assert record.levelname == "WARNING" and "no alone.json next to it" in record.message
    said = "hidden_act='gelu'" if name == "hf_vit" else "global_pool='token'"
    assert said in record.message and "(0.5, 0.5, 0.5)" in record.message


@pytest.mark.parametrize("stated", [None, {}, {"architecture": "vit_tiny_patch16_224"}])
def test_timm_pools_patches_where_it_has_a_norm_for_that(golden, tmp_path, caplog, stated):
    caplog.set_level("INFO", "vit_jax")
    arrays = load_file(golden / "timm_vit.safetensors")
    arrays = {re.sub(r"^norm\.", "fc_norm.", name): array for name, array in arrays.items()}
    save_file(arrays, tmp_path / "model.safetensors")
    if stated is not None:
        args = {"num_heads": 4} | ({} if stated else {"global_pool": "avg", "class_token": True})
        (tmp_path / "model.json").write_text(json.dumps(stated | {"model_args": args}))
    model, _ = load_pretrained(tmp_path / "model.safetensors")
    assert (model.pool, model.norm_pooled, model.has_class_token) == ("gap", True, True)
    assert ("global_pool='avg'" in caplog.text) == (stated != {})


def test_timm_without_positions_is_read_as_it_was_written(tmp_path):
    path, _, _ = make("timm", tmp_path / "deit", name="DeiT-mu/4", pos_embed="none", gelu="exact")
    assert not load_file(path / "model.safetensors")["pos_embed"].any()  # it cannot be without
    path, model, variables = make("timm", tmp_path, pos_embed="none", gelu="exact")
    again, found = load_pretrained(path)
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, found, variables)


def test_the_pooler_of_a_distilled_model_is_left_out(golden, tmp_path, caplog):
    """transformers' DeiTModel has one, which none of its published heads has learned with."""
    caplog.set_level("INFO", "vit_jax")
    path = shutil.copytree(golden / "hf_deit", tmp_path / "backbone")
    arrays = {
        name.removeprefix("deit."): array
        for name, array in load_file(path / "model.safetensors").items()
        if "classifier" not in name
    }
    rng = np.random.default_rng(0)
    arrays["pooler.dense.weight"] = rng.standard_normal((32, 32)).astype(np.float32)
    arrays["pooler.dense.bias"] = rng.standard_normal(32).astype(np.float32)
    save_file(arrays, path / "model.safetensors")
    model, variables = load_pretrained(path)
    assert model.num_classes is None and "pooler.dense.weight" in caplog.text
    expected, theirs = load_pretrained(golden / "hf_deit")
    images = np.random.default_rng(1).uniform(-1, 1, (1, *model.image_size, 3)).astype(np.float32)
    found = model.apply(variables, images, method="tokens")
    np.testing.assert_array_equal(found, expected.apply(theirs, images, method="tokens"))


def test_a_new_head_has_no_hidden_layer(golden):
    with at_fault("hidden_head"):
        load_pretrained(golden / "vit_pretrained.npz", num_classes=3, hidden_head=True)


@pytest.mark.parametrize("format", ["hf", "timm"])
def test_the_decoder_of_a_masked_autoencoder_is_left_out(tmp_path, caplog, format):
    """As Hugging Face's ViTMAEForPreTraining and the authors' files have it."""
    caplog.set_level(logging.INFO, "vit_jax")
    path, _, variables = make(format, tmp_path, num_classes=None, image_size=(8, 8), **TOKEN)
    arrays = load_file(path / "model.safetensors")
    decoder = ["decoder.mask_token", "decoder.decoder_embed.weight"]
    if format == "hf":
        arrays = {f"vit.{name}": array for name, array in arrays.items()}
        config = json.loads((path / "config.json").read_text())
        config |= {"architectures": ["ViTMAEForPreTraining"], "model_type": "vit_mae"}
        config |= {"decoder_hidden_size": 16, "mask_ratio": 0.75, "norm_pix_loss": False}
        (path / "config.json").write_text(json.dumps(config))
    else:
        decoder = ["mask_token", "decoder_blocks.0.norm1.weight", "decoder_pos_embed"]
    save_file(arrays | {name: np.zeros((1, 4), np.float32) for name in decoder},
              path / "model.safetensors")  # fmt: skip
    _, found = load_pretrained(path)
    jax.tree.map(np.testing.assert_array_equal, found["params"], variables["params"])
    assert all(name in caplog.text for name in decoder)


@pytest.mark.parametrize("name", ["hf_vit_backbone", "hf_deit", "timm_vit.safetensors"])
def test_other_classes_get_a_linear_head_of_zeros(golden, name):
    _, variables = load_pretrained(golden / name, num_classes=7)
    heads = {n: p for n, p in variables["params"].items() if n.startswith("head")}
    two = {"head", "head_distillation"} if name == "hf_deit" else {"head"}
    assert heads.keys() == two
    for head in heads.values():
        assert head["kernel"].shape == (32, 7)
        assert not head["kernel"].any()


NOT_HELD = golden_page(pathlib.Path(__file__).with_name("not_held.txt"))


@pytest.mark.parametrize("case", NOT_HELD)
def test_what_a_format_cannot_hold_is_refused(tmp_path, case):
    format, _, fields = case.partition(" ")
    with pytest.raises(InputError) as error:
        make(format, tmp_path, **json.loads(fields))
    assert all(line in str(error.value) for line in NOT_HELD[case].splitlines())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["hf", "timm"])
@pytest.mark.parametrize("channels", [1, 4])
def test_other_numbers_of_channels(tmp_path, format, channels):
    """The files say the channels, a mean and a deviation of each, and give the same model."""
    model, variables = random_model("ViT-mu/4", gelu="exact", channels=channels)
    save_pretrained(tmp_path / "out", model, variables, format)
    config = json.loads((tmp_path / "out/config.json").read_text())
    if format == "hf":
        assert config["num_channels"] == channels
        pixels = json.loads((tmp_path / "out/preprocessor_config.json").read_text())["image_mean"]
    else:
        assert config["model_args"]["in_chans"] == channels
        assert config["pretrained_cfg"]["input_size"][0] == channels
        pixels = config["pretrained_cfg"]["mean"]
    assert len(pixels) == channels
    found, read = load_pretrained(tmp_path / "out")
    assert (found.channels, pretrained_spec(tmp_path / "out").channels) == (channels, channels)
    jax.tree.map(np.testing.assert_array_equal, read, variables)
