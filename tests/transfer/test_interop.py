"""What other libraries compute from files exported here, and we from theirs.

pip install torch torchvision transformers timm
python -m pytest -m interop tests/transfer/test_interop.py
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
from fake_hub import served
from pairs import siglip
from published import random_model
from safetensors.numpy import load_file, save_file
from test_modern import HF, NOT_WRITTEN, TIMM

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Pictures
from vit_jax.data.images.given import image_files
from vit_jax.data.native import PatchRule
from vit_jax.inference.outputs import outputs
from vit_jax.models import create_model
from vit_jax.transfer import (
    load_pretrained,
    pretrained_spec,
    read_pretrained,
    save_pretrained,
    with_image_size,
)
from vit_jax.transfer.export import export
from vit_jax.transfer.pretrained import Pretrained, Spec, load_image
from vit_jax.transfer.push import push

pytestmark = pytest.mark.interop

CASES = {
    "hf": [
        ("ViT-mu/4", {"gelu": "exact", "norm_eps": 1e-12}),
        ("ViT-mu/4", {"gelu": "tanh", "patch_size": (2, 6)}),
        ("DeiT-mu/4", {"gelu": "exact"}),
        ("DeiT-mu/4", {"distillation_head": False}),
    ],
    "timm": [
        ("ViT-mu/4", {"gelu": "exact"}),
        ("ViT-mu/4", {"pos_embed_class_token": False}),
        ("ViT-mu/4", {"pool": "gap", "norm_pooled": True, "class_token": True}),
        ("ViT-mu/4", {"pool": "gap"}),
        ("ViT-mu/4", {"pool": "map"}),
        ("ViT-mu/4", {"pool": "map", "class_token": True, "norm_eps": 1e-6}),
        ("ViT-mu/4", {"layer_scale": 0.1, "qkv_bias": False}),
        ("ViT-mu/4", {"gelu": "exact", "norm_eps": 1e-12}),
        ("ViT-mu/4", {"pos_embed": "none"}),
        ("ViT-mu/4", {"registers": 4}),
        ("ViT-mu/4", {"registers": 4, "pool": "gap"}),
        ("ViT-mu/4", {"gated_mlp": True, "gelu": "silu"}),
        ("ViT-mu/4", {"gated_mlp": True, "gelu": "silu", "registers": 2, "layer_scale": 0.1}),
        ("ViT-mu/4", {"pre_norm": True, "patch_bias": False, "gelu": "quick", "norm_eps": 1e-5}),
        ("DeiT-mu/4", {}),
        ("DeiT-mu/4", {"pos_embed": "none"}),
        ("DeiT-mu/4", {"pos_embed_class_token": False}),
    ],
}


DINOV2 = {"gelu": "exact", "mlp_dim": 96, "layer_scale": 1.0}
DINOV3 = {"gelu": "exact", "layer_scale": 1.0, "pos_embed": "none", "rotary": "normalised",
          "norm_eps": 1e-5, "key_bias": False, "registers": 2}  # fmt: skip
TOWERS = {
    "vit": {"gelu": "exact", "num_classes": 5},
    "dinov2": DINOV2,
    "dinov2_with_registers": DINOV2 | {"registers": 2},
    "dinov3": DINOV3,
    "siglip": {"gelu": "tanh", "pool": "map", "norm_eps": 1e-6},
    "clip": {"gelu": "quick", "pre_norm": True, "patch_bias": False, "norm_pooled": True,
             "norm_eps": 1e-5},
}  # fmt: skip
SQUARE_ONLY = ("dinov2", "dinov2_with_registers", "siglip", "clip")


def exported(tmp_path, format, name, fields, size=(8, 12)):
    """(folder, its images (2, H, W, 3), the logits that we compute).

    The model has positions of another size, `fields["image_size"]`, where it is given.
    """
    model, variables = random_model(name, **fields)
    images = np.random.default_rng(1).uniform(-1, 1, (2, *size, 3)).astype(np.float32)
    source = Pretrained("made here", model, tree.flatten_names(variables["params"]),
                        Spec(model.image_size, "antialiased"))  # fmt: skip
    source = with_image_size(source, size)
    save_pretrained(tmp_path / "made", source.model, source.variables, format)
    loaded, found = load_pretrained(tmp_path / "made")
    logits = np.asarray(jax.jit(loaded.apply)(found, images))
    return tmp_path / "made", images, logits


def assert_close(theirs, ours, tolerance=1e-4):
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=tolerance * np.abs(ours).max())


def by_torch(model, images):
    """What a model gives for images (B, H, W, 3)."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model.eval()(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))


def open_with_transformers(path):
    """The model of the folder `path`, without an array that is missing or not used."""
    transformers = pytest.importorskip("transformers")
    (architecture,) = json.loads((path / "config.json").read_text())["architectures"]
    kind = getattr(transformers, architecture)
    theirs, report = kind.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    transformers.AutoImageProcessor.from_pretrained(path)
    return theirs.eval()


@pytest.mark.parametrize("from_size", [(8, 8), (16, 16), (8, 12)])
@pytest.mark.parametrize("size", [(8, 8), (12, 12), (8, 12), (12, 8)])
@pytest.mark.parametrize("kind", TOWERS)
def test_transformers_computes_what_an_export_of_any_size_does(tmp_path, kind, size, from_size):
    """An export is refused where the class of transformers would compute something else."""
    fields = {"num_classes": None} | TOWERS[kind] | {"image_size": from_size}
    if kind in SQUARE_ONLY and size[0] != size[1]:
        with pytest.raises(InputError, match="needs a square"):
            exported(tmp_path, "hf", "ViT-mu/4", fields, size)
        assert not list(tmp_path.iterdir())
        return
    path, images, ours = exported(tmp_path, "hf", "ViT-mu/4", fields, size)
    found = by_torch(open_with_transformers(path), images)
    if kind == "vit":
        theirs = found.logits
    else:
        pooled = kind in ("siglip", "clip")
        theirs = found.pooler_output if pooled else found.last_hidden_state[:, 0]
    assert_close(theirs.numpy(), ours, 1e-5)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("name", "fields", "size"), [
    *((*model, size) for size in ((8, 8), (8, 12)) for model in (
        ("ViT-mu/4", {"gelu": "exact"}), ("DeiT-mu/4", {"distillation_head": False}),
        ("DeiT-mu/4", {"gelu": "exact"}))),
    ("ViT-mu/4", DINOV2 | {"pool": "token_gap"}, (8, 8)),  # others are refused
])  # fmt: skip
def test_transformers_has_the_loss_of_a_classifier(tmp_path, name, fields, size, loss):
    """Its pipeline turns logits into probabilities by `problem_type`."""
    transformers = pytest.importorskip("transformers")
    model, variables = random_model(name, image_size=size, **fields)
    spec = Spec(size, "half_pixel", loss=loss)
    save_pretrained(tmp_path / "made", model, variables, "hf", spec)
    pixels = np.random.default_rng(1).integers(0, 256, (*size, 3)).astype(np.uint8)
    PIL.Image.fromarray(pixels).save(tmp_path / "image.png")
    theirs = open_with_transformers(tmp_path / "made")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "made")
    pipe = transformers.pipeline("image-classification", theirs, image_processor=processor)
    found = {row["label"]: row["score"] for row in pipe(str(tmp_path / "image.png"), top_k=5)}
    source = read_pretrained(tmp_path / "made")
    files = image_files([str(tmp_path / "image.png")])
    ((ours, _),) = outputs(source, files, batch_size=8, what="probabilities")
    assert_close([found[f"LABEL_{i}"] for i in range(5)], ours[0])
    assert (abs(ours.sum() - 1) > 0.01) == (loss == "sigmoid")


@pytest.mark.parametrize(("problem", "loss"), [("single", "softmax"), ("multi", "sigmoid")])
def test_a_siglip_classifier_of_transformers_is_read(tmp_path, problem, loss):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tower = {"hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 40, "image_size": 8,
             "num_attention_heads": 2, "patch_size": 4, "vision_use_head": False}  # fmt: skip
    config = transformers.SiglipConfig(
        vision_config=tower, num_labels=5, problem_type=f"{problem}_label_classification"
    )
    torch.manual_seed(0)
    theirs = transformers.SiglipForImageClassification(config)
    theirs.save_pretrained(tmp_path)
    model, variables = load_pretrained(tmp_path)
    images = np.random.default_rng(1).uniform(-1, 1, (2, 8, 8, 3)).astype(np.float32)
    logits = by_torch(theirs, images).logits.numpy()
    assert_close(np.asarray(jax.jit(model.apply)(variables, images)), logits)
    assert pretrained_spec(tmp_path).loss == loss


@pytest.mark.parametrize("kind", ["ViT", "DeiT", "Dinov2", "Dinov2WithRegisters", "DINOv3ViT",
                                  "SiglipVision", "CLIPVision"])  # fmt: skip
def test_heads_that_a_config_omits_are_those_of_its_class(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 96, "image_size": 8,
             "patch_size": 4, "mlp_ratio": 2}  # fmt: skip
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes))
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    heads = config.pop("num_attention_heads")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_pretrained(tmp_path).model.num_heads == heads


@pytest.mark.parametrize(("name", "fields"), CASES["hf"])
def test_transformers_opens_the_folder(tmp_path, name, fields):
    path, images, ours = exported(tmp_path, "hf", name, fields)
    found = by_torch(open_with_transformers(path), images)
    assert_close(found.logits.numpy(), ours)


@pytest.mark.parametrize("distilled", [False, True])
def test_what_transformers_saved_is_read(tmp_path, distilled):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 40, "num_labels": 5,
             "num_attention_heads": 2, "patch_size": 4, "initializer_range": 0.3}  # fmt: skip
    torch.manual_seed(0)
    if distilled:
        config = transformers.DeiTConfig(**sizes, image_size=12)
        theirs = transformers.DeiTForImageClassificationWithTeacher(config)
    else:
        config = transformers.ViTConfig(**sizes, image_size=12, hidden_act="gelu_new")
        theirs = transformers.ViTForImageClassification(config)
    theirs.save_pretrained(tmp_path)
    model, variables = load_pretrained(tmp_path)
    images = np.random.default_rng(1).uniform(-1, 1, (2, 12, 12, 3)).astype(np.float32)
    logits = by_torch(theirs, images).logits.numpy()
    assert_close(np.asarray(jax.jit(model.apply)(variables, images)), logits)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_what_timm_holds_is_read(tmp_path, pool):
    torch = pytest.importorskip("torch")
    timm = pytest.importorskip("timm")
    args = {"img_size": 12, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2,
            "global_pool": pool}  # fmt: skip
    torch.manual_seed(0)
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=5, **args)
    arrays = {name: array.numpy() for name, array in theirs.state_dict().items()}
    rng = np.random.default_rng(0)
    arrays = {n: (0.3 * rng.standard_normal(a.shape)).astype(np.float32) for n, a in arrays.items()}
    theirs.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    save_file(arrays, tmp_path / "model.safetensors")
    stated = {"architecture": "vit_tiny_patch16_224", "num_classes": 5, "model_args": args}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    model, variables = load_pretrained(tmp_path)
    images = np.random.default_rng(1).uniform(-1, 1, (2, 12, 12, 3)).astype(np.float32)
    logits = by_torch(theirs, images).numpy()
    assert_close(np.asarray(jax.jit(model.apply)(variables, images)), logits)


@pytest.mark.parametrize(("name", "fields"), CASES["timm"])
def test_timm_takes_the_arguments_and_the_arrays(tmp_path, name, fields):
    timm = pytest.importorskip("timm")
    path, images, ours = exported(tmp_path, "timm", name, fields)
    theirs = timm.create_model(f"local-dir:{path}", pretrained=True)
    assert_close(by_torch(theirs, images).numpy(), ours)


def naflex_of(path, most, output, format):
    """A golden model, exported for pictures in their own shape."""
    source = read_pretrained(path)
    export(source._replace(model=source.model.clone(max_tokens=most)), output, format)


def test_transformers_opens_a_siglip_2(golden, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    naflex_of(golden / "hf_siglip2", 18, tmp_path / "out", "hf")
    theirs = transformers.Siglip2VisionModel.from_pretrained(tmp_path / "out").eval()
    with np.load(golden / "hf_siglip2/io.npz") as io, torch.no_grad():
        names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
        found = theirs(**{name: torch.from_numpy(io[name]) for name in names})
        assert_close(found.pooler_output.numpy(), io["features"], 2e-5)
    processor = transformers.Siglip2ImageProcessor.from_pretrained(tmp_path / "out")
    assert (processor.patch_size, processor.max_num_patches) == (16, 18)


@pytest.mark.parametrize("name", ["timm_vit.safetensors", "hf_vit"])
def test_the_card_s_own_lines_load_the_model(name, golden, tmp_path, monkeypatch):
    library = {"hf_vit": "transformers"}.get(name, "timm")
    pytest.importorskip(library)
    monkeypatch.setenv("HF_TOKEN", "hf_writes")
    images = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)
    with served({}, monkeypatch, tmp_path):
        format = {"timm": "timm", "transformers": "hf"}[library]
        card = push(read_pretrained(golden / name), "me/mine", format)["texts"]["README.md"]
        ours, theirs = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        exec(ours, found := {})
        exec(theirs, found_by_library := {})
    expected = jax.jit(found["model"].apply)(found["variables"], images)
    logits = by_torch(found_by_library["model"], images)
    assert_close(getattr(logits, "logits", logits).numpy(), expected, 2e-5)


def test_transformers_reads_texts_as_a_pair_of_ours_does(golden, tmp_path):
    transformers = pytest.importorskip("transformers")
    source = siglip(golden, tmp_path / "source")
    stated = source / "tokenizer_config.json"  # as `train_tokenizer` states it
    kept = ("tokenizer_class", "unk_token", "pad_token", "eos_token")
    stated.write_text(json.dumps({key: json.loads(stated.read_text())[key] for key in kept}))
    export(source, tmp_path / "out", "hf_pair")
    labels = ["a red boat", "a cat and a dog"]
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "out")
    found = processor(text=labels, padding="max_length", return_tensors="np")
    assert {*found} == {"input_ids"}
    ours = read_pretrained(source).read_text_side().read_tokenizer()(labels)
    np.testing.assert_array_equal(found["input_ids"], ours)


@pytest.mark.parametrize("name", ["timm_naflex", "timm_naflex_siglip"])
def test_timm_takes_a_naflexvit(golden, tmp_path, name):
    torch = pytest.importorskip("torch")
    timm = pytest.importorskip("timm")
    naflex_of(golden / f"{name}.safetensors", 40, tmp_path / "out", "timm")
    config = json.loads((tmp_path / "out/config.json").read_text())
    theirs = timm.create_model(
        config["architecture"], num_classes=config["num_classes"], **config["model_args"]
    )
    arrays = load_file(tmp_path / "out/model.safetensors")
    theirs.load_state_dict({key: torch.from_numpy(array) for key, array in arrays.items()})
    with np.load(golden / f"{name}.io.npz") as io, torch.no_grad():
        names = ("patches", "patch_coord", "patch_valid")
        found = theirs.eval()({key: torch.from_numpy(io[key]) for key in names})
        assert_close(found.numpy(), io["logits"], 2e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"pool": "gap"}, {"pool": "gap", "registers": 2, "layer_scale": 0.1}, {"pool": "token"},
        {"pool": "map"},
    ],
)  # fmt: skip
def test_timm_takes_models_of_pictures_trained_here(tmp_path, fields):
    torch = pytest.importorskip("torch")
    timm = pytest.importorskip("timm")
    model, variables = random_model(image_size=(12, 12), patch_size=4, max_tokens=9, **fields)
    spec = Spec((12, 12), "antialiased", ops="decode", rule=PatchRule((4, 4), 9))
    source = Pretrained("mine", model, tree.flatten_names(variables["params"]), spec)
    export(source, tmp_path / "out", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    patches = np.random.default_rng(0).normal(size=(2, 9, 4, 4, 3)).astype(np.float32)
    grids = np.array([[2, 4], [3, 1]], np.int32)
    ours = model.apply(variables, Pictures(jnp.asarray(patches), jnp.asarray(grids)))
    numbers, counts, columns = np.arange(9)[None], grids.prod(axis=1)[:, None], grids[:, 1:]
    valid = numbers < counts
    places = np.where(valid[..., None], np.stack([numbers // columns, numbers % columns], -1), 0)
    given = {"patches": patches.reshape(2, 9, -1), "patch_coord": places, "patch_valid": valid}
    with torch.no_grad():
        found = theirs({name: torch.from_numpy(array) for name, array in given.items()})
    assert_close(found.numpy(), np.asarray(ours), 2e-5)


def test_timm_takes_an_efficientnet_and_gives_one(tmp_path):
    torch = pytest.importorskip("torch")
    timm = pytest.importorskip("timm")
    factors = {"width_factor": 0.125, "depth_factor": 0.3}
    model = create_model("EfficientNet-B0", 5, (33, 48), **factors)
    images = np.random.default_rng(1).uniform(-1, 1, (2, 33, 48, 3)).astype(np.float32)
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        values = 0.3 * rng.standard_normal(leaf.shape) + ("norm" in str(path[-2]))
        return np.abs(values).astype(np.float32) if "var" in str(path[-1]) else np.float32(values)

    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    variables = jax.tree_util.tree_map_with_path(draw, shapes)
    save_pretrained(tmp_path / "made", model, variables, "timm")
    theirs = timm.models.efficientnet._gen_efficientnet(
        "tf_efficientnet_b0", *factors.values(), num_classes=5, bn_eps=1e-3, pad_type="same"
    )
    arrays = load_file(tmp_path / "made/model.safetensors")
    theirs.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    logits = by_torch(theirs, images).numpy()
    assert_close(logits, np.asarray(jax.jit(model.apply)(variables, images)))
    save_file(
        {n: a.numpy() for n, a in theirs.state_dict().items()}, tmp_path / "model.safetensors"
    )
    stated = {"architecture": "tf_efficientnet_b0", "num_classes": 5, "width": 0.125, "depth": 0.3}
    (tmp_path / "model.json").write_text(json.dumps(stated))
    loaded, found = load_pretrained(tmp_path / "model.safetensors")
    assert_close(logits, np.asarray(jax.jit(loaded.apply)(found, images)))


def write_folder(path, format, image_size, **stated):
    """A folder of `format` whose image preprocessing is `stated`, with random weights."""
    save_pretrained(path, *random_model(image_size=image_size), format)
    beside = path / {"timm": "config.json", "hf": "preprocessor_config.json"}[format]
    content = json.loads(beside.read_text())
    if format == "timm":
        content["pretrained_cfg"] = {"input_size": [3, *image_size]} | stated
    beside.write_text(json.dumps(content if format == "timm" else stated))


def assert_same_pixels(path, transform):
    """Of smooth images and of noise, of odd sizes: at most 2 of 255 apart, and nearly all equal."""
    spec = pretrained_spec(path)
    rng = np.random.default_rng(0)
    for height, width in ((103, 151), (150, 101), (70, 70), (30, 43)):
        grid = np.mgrid[:height, :width] / 20
        waves = 127.5 + 127 * np.sin(grid[0] + [[[0.0]], [[1.0]], [[2.0]]] * grid[1])
        noise = rng.integers(0, 256, (height, width, 3))
        for pixels in (waves.transpose(1, 2, 0), noise):
            image = PIL.Image.fromarray(np.uint8(pixels))
            image.save(path / "image.png")
            theirs = np.asarray(transform(image)).transpose(1, 2, 0)
            difference = np.abs(load_image(path / "image.png", spec) - theirs) * spec.std * 255
            assert difference.max() < 2.01
            assert (difference > 0.01).mean() < 0.05


@pytest.mark.parametrize("image_size", [(32, 32), (48, 36)])
@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize(
    ("crop_pct", "interpolation"),
    [(1.0, "bicubic"), (0.9, "bicubic"), (0.81, "bilinear"), (None, None)],
)
def test_images_are_cut_as_timm_does(tmp_path, image_size, mode, crop_pct, interpolation):
    pytest.importorskip("torchvision")
    timm = pytest.importorskip("timm")
    stated = {"crop_mode": mode, "crop_pct": crop_pct, "interpolation": interpolation}
    write_folder(tmp_path, "timm", image_size, **{k: v for k, v in stated.items() if v})
    stated = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
    stated = timm.data.resolve_data_config(pretrained_cfg=stated)
    transform = timm.data.create_transform(**stated)
    assert_same_pixels(tmp_path, transform)


@pytest.mark.parametrize(
    "stated",
    [
        {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}},
        {"feature_extractor_type": "ViTFeatureExtractor", "size": 32, "resample": 3},
        {"image_processor_type": "DeiTImageProcessor", "size": 39, "crop_size": 32},
        {"feature_extractor_type": "DeiTFeatureExtractor", "size": 37, "crop_size": 32,
         "do_normalize": False},
        {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 39},
         "crop_size": {"height": 32, "width": 32}},
        {"image_processor_type": "ViTImageProcessor", "size": {"shortest_edge": 41},
         "do_center_crop": True, "crop_size": 32, "do_rescale": False, "image_mean": [1, 2, 3],
         "image_std": [100, 90, 80]},
    ],
)  # fmt: skip
def test_images_are_cut_as_transformers_does(tmp_path, stated):
    pytest.importorskip("torchvision")
    transformers = pytest.importorskip("transformers")
    write_folder(tmp_path, "hf", (32, 32), **stated)
    kind = stated.get("image_processor_type") or stated["feature_extractor_type"].replace(
        "FeatureExtractor", "ImageProcessor"
    )
    processor = getattr(transformers, kind).from_pretrained(tmp_path)
    assert_same_pixels(tmp_path, lambda image: processor(image)["pixel_values"][0])


@pytest.mark.parametrize("name", [name for name in TIMM + HF if name not in (*NOT_WRITTEN, "vit5")])
def test_libraries_compute_their_goldens_from_our_files(golden, tmp_path, name):
    source = golden / name if name in HF else golden / f"{name}.safetensors"
    pretrained = read_pretrained(source)
    format = "hf" if name in HF else "timm"
    save_pretrained(
        tmp_path / "made", pretrained.model, pretrained.variables, format, pretrained.spec
    )
    expected = np.load(source / "io.npz" if name in HF else golden / f"{name}.io.npz")
    if name in HF:
        transformers = pytest.importorskip("transformers")
        config = json.loads((tmp_path / "made/config.json").read_text())
        (architecture,) = config["architectures"]
        model = getattr(transformers, architecture).from_pretrained(tmp_path / "made")
        found = by_torch(model, expected["image"])
        found = getattr(found, "logits", None) if "logits" in expected else found[0]
    else:
        timm = pytest.importorskip("timm")
        model = timm.create_model(f"local-dir:{tmp_path / 'made'}", pretrained=True)
        found = by_torch(model, expected["image"])
    kind = "logits" if "logits" in expected else "tokens" if name in HF else "features"
    assert_close(found.numpy(), expected[kind])
