"""What other libraries compute from files exported here, and we from theirs.

pip install torch transformers timm
python -m pytest -m interop tests/transfer/test_interop.py
"""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vit_jax.models import create_model
from vit_jax.transfer import load_pretrained, save_pretrained

pytestmark = pytest.mark.interop

SIZES = {"width": 24, "depth": 2, "mlp_dim": 40, "num_heads": 2}
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
        ("ViT-mu/4", {"pos_embed": "none"}),
        ("DeiT-mu/4", {}),
        ("DeiT-mu/4", {"pos_embed": "none"}),
        ("DeiT-mu/4", {"pos_embed_class_token": False}),
    ],
}


def exported(tmp_path, format, name, fields):
    """(folder, its images (2, 3, H, W), the logits that we compute)."""
    model = create_model(name, 5, (8, 12), **(SIZES | fields))
    images = np.random.default_rng(1).uniform(-1, 1, (2, 8, 12, 3)).astype(np.float32)
    rng = np.random.default_rng(0)
    variables = jax.tree.map(
        lambda leaf: (0.3 * rng.standard_normal(leaf.shape)).astype(np.float32),
        jax.eval_shape(model.init, jax.random.key(0), images),
    )
    save_pretrained(tmp_path / "made", model, variables, format)
    loaded, found = load_pretrained(tmp_path / "made")
    logits = np.asarray(jax.jit(loaded.apply)(found, images))
    return tmp_path / "made", images.transpose(0, 3, 1, 2).copy(), logits


def assert_close(theirs, ours):
    np.testing.assert_allclose(theirs, ours, atol=1e-4 * np.abs(ours).max())


@pytest.mark.parametrize(("name", "fields"), CASES["hf"])
def test_transformers_opens_the_folder(tmp_path, name, fields):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path, images, ours = exported(tmp_path, "hf", name, fields)
    (architecture,) = json.loads((path / "config.json").read_text())["architectures"]
    kind = getattr(transformers, architecture)
    theirs, report = kind.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    transformers.ViTImageProcessor.from_pretrained(path)
    with torch.no_grad():
        assert_close(theirs.eval()(torch.from_numpy(images)).logits.numpy(), ours)


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
    theirs.eval().save_pretrained(tmp_path)
    model, variables = load_pretrained(tmp_path)
    images = np.random.default_rng(1).uniform(-1, 1, (2, 12, 12, 3)).astype(np.float32)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).logits.numpy()
    assert_close(np.asarray(jax.jit(model.apply)(variables, images)), logits)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_what_timm_holds_is_read(tmp_path, pool):
    torch = pytest.importorskip("torch")
    timm = pytest.importorskip("timm")
    args = {"img_size": 12, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2,
            "global_pool": pool}  # fmt: skip
    torch.manual_seed(0)
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=5, **args).eval()
    arrays = {name: array.numpy() for name, array in theirs.state_dict().items()}
    rng = np.random.default_rng(0)
    arrays = {n: (0.3 * rng.standard_normal(a.shape)).astype(np.float32) for n, a in arrays.items()}
    theirs.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    save_file(arrays, tmp_path / "model.safetensors")
    stated = {"architecture": "vit_tiny_patch16_224", "num_classes": 5, "model_args": args}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    model, variables = load_pretrained(tmp_path)
    images = np.random.default_rng(1).uniform(-1, 1, (2, 12, 12, 3)).astype(np.float32)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    assert_close(np.asarray(jax.jit(model.apply)(variables, images)), logits)


@pytest.mark.parametrize(("name", "fields"), CASES["timm"])
def test_timm_takes_the_arguments_and_the_arrays(tmp_path, name, fields):
    torch = pytest.importorskip("torch")
    timm = pytest.importorskip("timm")
    path, images, ours = exported(tmp_path, "timm", name, fields)
    config = json.loads((path / "config.json").read_text())
    theirs = timm.create_model(
        config["architecture"], num_classes=config["num_classes"], **config["model_args"]
    )
    arrays = {key: torch.from_numpy(a) for key, a in load_file(path / "model.safetensors").items()}
    theirs.load_state_dict(arrays)
    with torch.no_grad():
        assert_close(theirs.eval()(torch.from_numpy(images)).numpy(), ours)
