"""Models of images and texts: what their libraries compute from the files, and the files again."""

import json
import shutil

import jax
import numpy as np
import pytest
from etils import epath
from fake_hub import COMMITS, move_hub, served
from pairs import siglip
from safetensors.numpy import load_file, save_file

import vit_jax
from vit_jax.base.errors import InputError
from vit_jax.models.text import unit
from vit_jax.transfer import read_pretrained, with_image_size
from vit_jax.transfer.export import export
from vit_jax.transfer.huggingface import write_pair
from vit_jax.transfer.names import HEADS_BY_WIDTH

HF = ("hf_clip_pair", "hf_clip_gelu", "hf_siglip_pair", "hf_siglip_text")
OPEN_CLIP = ("open_clip", "open_clip_siglip")
RESAMPLED = ("hf_clip_pair", "hf_siglip_pair")  # the others at their own size
TOLERANCE = 2e-5  # of the largest value


@pytest.fixture(autouse=True)
def width_of_goldens(monkeypatch):
    """open_clip names a model of timm, whose sizes its files do not state."""
    monkeypatch.setitem(HEADS_BY_WIDTH, 48, 4)


def outputs(pretrained, images, ids):
    side = pretrained.read_text_side()

    def apply(method, *args):
        return jax.jit(side.matcher.apply, static_argnames="method")(
            side.variables, *args, method=method
        )

    of_tower = jax.jit(pretrained.model.apply)(pretrained.variables, images)
    features, texts = apply("image_features", of_tower), apply("text_features", ids)
    return {
        "features": features,
        "text_features": texts,
        "image_embeds": unit(features),
        "text_embeds": unit(texts),
        "logits_per_image": apply(None, of_tower, ids),
    }


@pytest.mark.parametrize(
    ("name", "suffix"),
    [(name, "_resampled" * (name in RESAMPLED)) for name in HF + OPEN_CLIP]
    + [
        pytest.param(name, "_resampled" * (name not in RESAMPLED), marks=pytest.mark.slow)
        for name in HF
    ],
)
def test_parity(golden, name, suffix):
    with np.load(golden / name / "io.npz") as io:
        images, pretrained = io[f"image{suffix}"], read_pretrained(golden / name)
        pretrained = with_image_size(pretrained, images.shape[1:3])
        found = outputs(pretrained, images, io["input_ids"])
        for key, ours in found.items():
            expected = io[key if key.startswith("text") else key + suffix]
            distance = np.abs(np.asarray(ours) - expected).max() / np.abs(expected).max()
            assert distance < TOLERANCE, f"{key}: {distance:.1e}"


@pytest.mark.parametrize("name", HF)
def test_a_golden_is_written_bit_for_bit(golden, tmp_path, name):
    receipt = vit_jax.export(golden / name, tmp_path / "out", "hf_pair")
    theirs = load_file(golden / name / "model.safetensors")
    ours = load_file(tmp_path / "out/model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        assert ours[key].shape == array.shape and ours[key].tobytes() == array.tobytes(), key
    stated = json.loads((golden / name / "config.json").read_text())
    written = json.loads((tmp_path / "out/config.json").read_text())
    for key, value in written.items():
        if isinstance(value, dict):
            assert value.items() <= stated[key].items()
        else:
            assert value == stated[key]
    assert receipt["read_back"]["largest_logit_difference"] == 0
    assert receipt["parameters"]["count"] == sum(array.size for array in theirs.values())
    assert receipt["text"]["length"] == stated["text_config"]["max_position_embeddings"]


def test_a_tower_alone_is_written_as_before(golden, tmp_path):
    export(golden / "hf_clip_pair", tmp_path / "tower", "hf")
    assert not [n for n in load_file(tmp_path / "tower/model.safetensors") if "text" in n]
    with pytest.raises(InputError, match="the model has no text tower; needs one with both"):
        export(tmp_path / "tower", tmp_path / "pair", "hf_pair")
    with pytest.raises(InputError, match="its image tower is not CLIP's or SigLIP's"):
        export(golden / "hf_vit", tmp_path / "pair", "hf_pair")


@pytest.mark.parametrize("name", ["hf_clip_pair", "hf_siglip_pair"])
def test_a_text_side_that_transformers_lacks_is_refused(golden, tmp_path, name):
    pretrained = read_pretrained(golden / name)
    side = pretrained.read_text_side()
    matcher, text = side.matcher, side.matcher.text
    width = None if matcher.image_width else pretrained.model.width
    others = [
        ({"text": text.clone(causal=not text.causal)}, "objective.causal"),
        ({"image_width": width}, "objective.common_width"),
        ({"has_bias": not matcher.has_bias}, "objective.loss"),
    ]
    if text.causal:  # transformers would take the largest id of a text for its end
        others += [({"text": text.clone(end_id=2)}, "data.tokenizer: ends texts with the id 2")]
    for change, says in others:
        other = side._replace(matcher=matcher.clone(**change))
        given = pretrained._replace(read_text_side=lambda other=other: other)
        with pytest.raises(InputError, match=rf"hf_pair cannot hold .*{says}"):
            write_pair(epath.Path(tmp_path), given)
    assert not [*tmp_path.iterdir()]


def test_a_scale_above_its_bound_is_written_as_the_bound(golden, tmp_path):
    pretrained = read_pretrained(golden / "hf_clip_pair")
    side = pretrained.read_text_side()
    side = side._replace(
        matcher=side.matcher.clone(max_scale=100.0),
        params=side.params | {"logit_scale": np.float32(5)},
    )
    tmp_path = epath.Path(tmp_path)
    write_pair(tmp_path, pretrained._replace(read_text_side=lambda: side))
    written = load_file(tmp_path / "model.safetensors")["logit_scale"]
    assert np.exp(written) == pytest.approx(100, rel=1e-6)


def test_an_export_takes_the_tokenizer_along(golden, tmp_path, json_of):
    source = siglip(golden, tmp_path / "source")
    length = read_pretrained(source).read_text_side().matcher.text.length
    of_source = source / "tokenizer_config.json"
    own = {"model_max_length": None, "model_input_names": ["input_ids", "attention_mask"]}
    of_source.write_text(json.dumps(json.loads(of_source.read_text()) | own))
    words = [f"--init_from={source}", f"--output={tmp_path / 'out'}", "--format=hf_pair"]
    files = json_of("export", *words)["files"]
    assert {"spiece.model", "tokenizer_config.json"} <= {*files}
    assert (tmp_path / "out/spiece.model").read_bytes() == (source / "spiece.model").read_bytes()
    stated = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert (stated["model_input_names"], stated["model_max_length"]) == (["input_ids"], length)


def test_numbers_of_positions_are_no_weights(golden, tmp_path):
    """Older files of CLIP hold them as int64."""
    shutil.copytree(golden / "hf_clip_pair", tmp_path / "old")
    arrays = load_file(golden / "hf_clip_pair/model.safetensors")
    arrays["text_model.embeddings.position_ids"] = np.arange(14)[None]
    arrays["vision_model.embeddings.position_ids"] = np.arange(17)[None]
    save_file(arrays, tmp_path / "old/model.safetensors")
    assert read_pretrained(tmp_path / "old").read_text_side().matcher.text.length == 14


def changed(golden, path, name, change):
    shutil.copytree(golden / name, path)
    file = path / ("config.json" if name.startswith("hf") else "open_clip_config.json")
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c["text_config"].update(vocab_size=91), "vocab_size=91, but 90 in the arrays"),
        (lambda c: c["text_config"].update(num_attention_heads=5), "num_attention_heads=5: needs"),
        (lambda c: c["text_config"].update(hidden_act="relu"), "hidden_act"),
    ],
)
def test_a_wrong_text_tower_is_found_when_it_is_used(golden, tmp_path, change, says):
    pretrained = read_pretrained(changed(golden, tmp_path / "own", "hf_clip_pair", change))
    with pytest.raises(InputError, match=says):
        pretrained.read_text_side()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c["model_cfg"]["text_cfg"].update(pool_type="last"),
         "text_cfg.pool_type='last': needs 'argmax'"),
        (lambda c: c["model_cfg"]["text_cfg"].update(hf_model_name="roberta"),
         "text_cfg.hf_model_name='roberta': needs None"),
        (lambda c: c["preprocess_cfg"].update(resize_mode="longest"),
         "resize_mode='longest': needs shortest or squash"),
    ],
)  # fmt: skip
def test_other_towers_of_open_clip_are_refused(golden, tmp_path, change, says):
    with pytest.raises(InputError, match=says):
        read_pretrained(changed(golden, tmp_path / "own", "open_clip", change))


def test_a_run_begins_with_a_text_tower_only_if_its_files_say_how_texts_are_cleaned(golden):
    sides = [read_pretrained(golden / n).read_text_side() for n in ("hf_siglip_pair", *OPEN_CLIP)]
    assert [side.by_files for side in sides] == [True, False, False]


def test_open_clip_needs_its_config(golden, tmp_path):
    shutil.copy(golden / "open_clip/open_clip_model.safetensors", tmp_path)
    with pytest.raises(InputError, match=r"there is no open_clip_config.json; give the folder"):
        read_pretrained(tmp_path / "open_clip_model.safetensors")


def test_of_two_files_in_a_folder_the_given_one_is_read(golden, tmp_path):
    path = shutil.copytree(golden / "open_clip", tmp_path / "both")
    shutil.copytree(golden / "hf_siglip_pair", path, dirs_exist_ok=True)
    for name, causal in (("", False), ("open_clip_model.safetensors", True)):
        assert read_pretrained(path / name).read_text_side().matcher.text.causal == causal


@pytest.mark.parametrize("name", OPEN_CLIP)
def test_images_are_prepared_as_open_clip_states(golden, tmp_path, name, caplog):
    def squash(config):
        stated = {"mean": [0.1] * 3, "std": [0.2] * 3, "resize_mode": "squash"}
        config["preprocess_cfg"] = stated | {"interpolation": "bilinear"}

    spec = read_pretrained(changed(golden, tmp_path / "own", name, squash)).spec
    assert (spec.mean, spec.std) == ((0.1,) * 3, (0.2,) * 3)
    assert spec.cut[:3] == (1.0, "squash", "bilinear")
    assert "mean" not in caplog.text
    path = changed(golden, tmp_path / "none", name, lambda c: c.pop("preprocess_cfg"))
    spec = read_pretrained(path).spec
    assert spec.mean == (0.48145466, 0.4578275, 0.40821073)
    assert spec.cut[:3] == (1.0, "center", "bicubic")


def test_from_the_hub(golden, tmp_path, monkeypatch):
    """The tokenizer is fetched with a text tower, and open_clip's file where there is no other."""
    folders = {"org/siglip": siglip(golden, tmp_path / "made"), "org/open": golden / "open_clip",
               "org/vit": golden / "hf_vit"}  # fmt: skip
    files = {
        (name, COMMITS["main"]): {file.name: file.read_bytes() for file in folder.iterdir()}
        for name, folder in folders.items()
    }
    with served(files, monkeypatch, tmp_path) as hub:
        side = read_pretrained("hf:org/siglip").read_text_side()
        assert side.read_tokenizer()(["a cat"]).shape == (1, 40)
        assert read_pretrained("hf:org/open").read_text_side().matcher.text.causal
        hub.asked.clear()
        read_pretrained("hf:org/vit")
        assert "spiece.model" not in {file for _, file in hub.asked}
    move_hub(monkeypatch, "http://127.0.0.1:9")
    assert read_pretrained("hf:org/open").read_text_side().matcher.text.causal  # from the cache
