"""What folders of transformers state, and what its classes cannot compute: read and written."""

import json
import shutil

import numpy as np
import pytest
from at_fault import at_fault
from published import random_model
from safetensors.numpy import load_file, save_file

from vit_jax.base.errors import InputError
from vit_jax.data.ops import parse_ops
from vit_jax.transfer import pretrained_spec, read_pretrained, save_pretrained
from vit_jax.transfer.pretrained import Cut, Spec, ops_for, ops_of_cut, share_of

CLASSIFIERS = {
    "ViT-mu/4": {"gelu": "exact"},
    "DeiT-mu/4": {"gelu": "exact"},
    "Dinov2": {"gelu": "exact", "mlp_dim": 96, "layer_scale": 1.0, "pool": "token_gap"},
}
TOWERS = {
    "dinov2": {"gelu": "exact", "mlp_dim": 96, "layer_scale": 1.0},
    "dinov2 with registers": {"gelu": "exact", "mlp_dim": 96, "layer_scale": 1.0, "registers": 2},
    "siglip": {"gelu": "tanh", "pool": "map"},
    "clip": {"gelu": "quick", "pre_norm": True, "patch_bias": False, "norm_pooled": True},
}


def tower(kind, **fields):
    return random_model(num_classes=None, **(TOWERS[kind] | fields))


def copied(golden, tmp_path, name, **stated):
    """A copy of a golden folder whose config.json states other values; None: states none."""
    path = shutil.copytree(golden / name, tmp_path / name)
    config = json.loads((path / "config.json").read_text()) | stated
    kept = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))
    return path


@pytest.mark.parametrize("loss", ["softmax", "sigmoid", None])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_loss_is_written_and_read(tmp_path, name, loss):
    family = "ViT-mu/4" if name == "Dinov2" else name
    model, variables = random_model(family, image_size=(8, 8), **CLASSIFIERS[name])
    spec = Spec((8, 8), "half_pixel", loss=loss)
    save_pretrained(tmp_path / "made", model, variables, "hf", spec)
    config = json.loads((tmp_path / "made/config.json").read_text())
    assert config["architectures"][0].startswith(name.partition("-")[0])
    problem = {"softmax": "single_label", "sigmoid": "multi_label"}.get(loss)
    assert config.get("problem_type") == (problem and f"{problem}_classification")
    assert pretrained_spec(tmp_path / "made").loss == loss


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_siglip_classifier_states_its_loss_and_its_names(golden, tmp_path, is_nested):
    """Beside the tower's values, which published folders nest: as transformers 4 with all keys."""
    own = {"problem_type": "multi_label_classification", "id2label": {"0": "a", "1": "b", "2": "c"}}
    path = copied(golden, tmp_path, "hf_siglip", **own)
    if is_nested:
        tower = json.loads((golden / "hf_siglip/config.json").read_text())
        tower |= {"problem_type": None, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}}
        (path / "config.json").write_text(json.dumps({"vision_config": tower} | own))
    arrays = load_file(path / "model.safetensors")
    arrays |= {"classifier.weight": np.ones((3, 48), np.float32),
               "classifier.bias": np.zeros(3, np.float32)}  # fmt: skip
    save_file(arrays, path / "model.safetensors")
    spec = pretrained_spec(path)
    assert (spec.loss, spec.class_names) == ("sigmoid", ("a", "b", "c"))


@pytest.mark.parametrize("name", ["hf_vit", "hf_dinov2_with_registers_classifier"])
def test_a_regression_is_no_classifier(golden, tmp_path, name):
    with at_fault("problem_type"):
        read_pretrained(copied(golden, tmp_path, name, problem_type="regression"))


def test_a_pooler_that_is_kept_has_tanh(golden, tmp_path):
    with at_fault("pooler_act"):
        read_pretrained(copied(golden, tmp_path, "hf_vit_backbone", pooler_act="gelu"))
    read_pretrained(copied(golden, tmp_path, "hf_vit", pooler_act="gelu"))  # has none


@pytest.mark.parametrize(("kind", "heads"), [("hf_dinov2", 12), ("hf_dinov3", 6), ("hf_clip", 12)])
def test_heads_that_config_json_omits_are_those_of_transformers(golden, tmp_path, kind, heads):
    config = json.loads((golden / kind / "config.json").read_text())
    inner = config.get("vision_config", config)
    inner.pop("num_attention_heads")
    path = copied(golden, tmp_path, kind)
    (path / "config.json").write_text(json.dumps(config))
    assert read_pretrained(path).model.num_heads == heads


@pytest.mark.parametrize("kind", TOWERS)
def test_positions_that_transformers_takes_for_a_square_are_not_written(tmp_path, kind):
    with pytest.raises(InputError, match=r"export it as .*timm.*: image_size=\(8, 12\), but"):
        save_pretrained(tmp_path / "made", *tower(kind), "hf")
    assert not list(tmp_path.iterdir())
    save_pretrained(tmp_path / "made", *tower(kind), "timm")


@pytest.mark.parametrize("kind", ["siglip", "clip"])
def test_patches_are_square_where_transformers_squares_their_number(tmp_path, kind):
    model, variables = tower(kind, image_size=(8, 8), patch_size=(4, 2))
    with pytest.raises(InputError, match=r"patch_size=\(4, 2\), but"):
        save_pretrained(tmp_path / "made", model, variables, "hf")


def test_a_dinov2_folder_of_images_that_are_not_square_is_refused(golden, tmp_path):
    with at_fault("image_size"):
        read_pretrained(copied(golden, tmp_path, "hf_dinov2", image_size=[28, 112]))


def margins(ops, side, resized):
    """(rows, columns) that the crop at the end of `ops` cuts off at the top and on the left."""
    crop = parse_ops(ops, (side, side))[0][-1]
    rows, columns = resized
    places = np.stack(np.mgrid[:rows, :columns], axis=-1).astype(np.int32)
    return (*crop(places, None)[0, 0].numpy(),)


SIDES = range(32, 513)


def test_crops_are_those_of_transformers_at_every_size(golden, tmp_path):
    """Its processor resizes the shorter side in proportion, and rounds margins down."""
    path = copied(golden, tmp_path, "hf_dinov2")
    stated = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 256},
              "crop_size": {"height": 224, "width": 224}}  # fmt: skip
    (path / "preprocessor_config.json").write_text(json.dumps(stated))
    spec = pretrained_spec(path)
    for side in SIDES:
        ops, resized = ops_for(spec.at((side, side))), side * 256 // 224
        assert ops == f"decode|torchvision_resize({resized}, 'bicubic')|central_crop"
        if side % 23 == 0:
            found = margins(ops, side, (resized, resized + 1))
            assert found == (int((resized - side) / 2.0), int((resized + 1 - side) / 2.0)), side


def test_crops_are_those_of_timm_at_every_size():
    """It rounds the size down, and margins to even, as Python's round does."""
    for side in SIDES:
        ops, resized = ops_of_cut(Cut(0.9, "center"), (side, side)), int(side / 0.9)
        assert ops == f"decode|torchvision_resize({resized}, 'bilinear')|torchvision_crop"
        if side % 23 == 0:
            found = margins(ops, side, (resized, resized + 1))
            assert found == (round((resized - side) / 2), round((resized + 1 - side) / 2)), side


@pytest.mark.parametrize(("crop", "resized"), [(224, 256), (224, 249), (384, 439), (518, 592)])
def test_a_share_gives_the_whole_numbers_of_its_ratio(crop, resized):
    share = share_of(crop, resized)
    assert all(Cut(share).resized((n, n))[0] == n * resized // crop for n in range(1, 4 * crop))
