"""Training, evaluation and prediction from Python."""

import pathlib
import re
import types
from functools import partial
from unittest.mock import create_autospec

import jax
import jax.numpy as jnp
import notebooks
import numpy as np
import pytest
from at_fault import at_fault
from flax import nnx
from PIL import Image
from sklearn.datasets import load_digits

import vit_jax
from vit_jax import create_model, load_image, predict, read_pretrained
from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.data.images.given import open_images
from vit_jax.inference import layers
from vit_jax.models.patches import extract_patches
from vit_jax.run.setup.validation import find_faults
from vit_jax.transfer.fit import unstack_layers

pytestmark = pytest.mark.usefixtures("one_device")

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def source(golden):
    return read_pretrained(golden / "hf_vit")  # 32 x 32 pixels


def params_of(source):
    return tree.unflatten_names(source.params)


def pixels(*shape):
    return RNG.integers(0, 256, shape, np.uint8)


def test_every_kind_of_image_is_preprocessed_as_its_file(source, tmp_path):
    kinds = {"a.png": pixels(40, 50, 3), "grey.png": pixels(33, 32), "alpha.png": pixels(32, 32, 4)}
    paths = [tmp_path / name for name in kinds]
    for path, array in zip(paths, kinds.values(), strict=True):
        Image.fromarray(array).save(path)
    expected = predict(paths, source, output="logits")
    image = load_image(paths[0], source.spec)
    by_hand = jax.jit(source.model.apply)({"params": params_of(source)}, image[None])
    np.testing.assert_allclose(expected[:1], by_hand, rtol=1e-4, atol=1e-5)
    images = [Image.open(path) for path in paths]
    folder = tmp_path / "two"
    folder.mkdir()
    for path in paths[1:]:
        (folder / path.name).symlink_to(path)
    mixed = [*images, *kinds.values(), str(paths[0]), folder]
    found = predict(mixed, source, output="logits", batch_size=8)
    in_folder = [paths.index(path) for path in sorted(paths[1:])]
    np.testing.assert_allclose(found, expected[[0, 1, 2, 0, 1, 2, 0, *in_folder]], rtol=1e-5)
    for one in (images[0], kinds["a.png"][None]):
        np.testing.assert_array_equal(predict(one, source, output="logits"), expected[:1])
    rows = predict([images[0], folder], source, batch_size=8)
    assert [row["file"] for row in rows] == [
        "image 0", *(f"{folder}/{path.name}" for path in sorted(paths[1:]))
    ]  # fmt: skip
    assert all(open_images(one).num_examples == 1 for one in (paths[0], kinds["a.png"]))
    assert open_images(folder).num_examples == 2


def test_an_image_is_turned_as_its_file_is(source, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "turned.jpg"
    Image.fromarray(pixels(32, 48, 3)).save(path, exif=exif)
    of_file = predict(path, source, output="logits")
    image = Image.open(path)
    np.testing.assert_allclose(predict(image, source, output="logits"), of_file, atol=1e-5)
    older = source._replace(spec=source.spec._replace(exif=False))
    assert np.abs(predict(image, older, output="logits") - of_file).max() > 1e-4


def test_classes_and_what_cannot_be_read(source, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    Image.fromarray(pixels(32, 32, 3)).save(tmp_path / "whole.png")
    broken, whole = predict(tmp_path, source, top=2)
    assert "not a readable image (it holds no image" in broken["error"]
    assert broken["file"].endswith("broken.png")
    probabilities = predict(tmp_path, source, output="probabilities")
    assert np.isnan(probabilities[0]).all()
    assert probabilities[1].sum() == pytest.approx(1, abs=1e-5)
    best = whole["classes"][0]
    assert best["index"] == probabilities[1].argmax() and len(whole["classes"]) == 2
    assert best["probability"] == pytest.approx(probabilities[1].max(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "scan"),
    [("DeiT-Ti/8", True), pytest.param("R+ViT-Ti/8", False, marks=pytest.mark.slow)],
)
def test_outputs_of_layers_add_up(name, scan):
    """The final norm of the last layer's output gives the tokens; weights are a distribution."""
    small = {"width": 16, "depth": 2, "mlp_dim": 32, "num_heads": 2, "scan": scan}
    model = create_model(name, 5, 16, pos_embed="learned_2d" if scan else "relative", **small)
    images = jnp.asarray(RNG.normal(size=(2, 16, 16, 3)), jnp.float32)
    params = jax.jit(model.init)(jax.random.key(0), images)["params"]
    tokens = jax.jit(partial(model.apply, method="tokens"))({"params": params}, images)
    if scan:
        params = unstack_layers(params)
    found = jax.jit(partial(layers.layer_outputs, model))(params, images)
    assert [x.shape for x in found] == [tokens.shape] * 2
    x = found[-1] - found[-1].mean(-1, keepdims=True)
    normal = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(normal, tokens, atol=2e-5)  # with scale 1 and bias 0
    weights = jax.jit(partial(layers.attention_weights, model))(params, images)
    n = tokens.shape[1]
    assert [w.shape for w in weights] == [(2, 2, n, n)] * 2
    np.testing.assert_allclose(weights[1].sum(-1), 1, rtol=1e-5)


def test_attention_weights_by_hand():
    model = create_model("ViT-mu/8", None, 16, num_heads=2, mlp_dim=32, depth=1)
    images = jnp.asarray(RNG.normal(size=(1, 16, 16, 3)), jnp.float32)
    params = jax.jit(model.init)(jax.random.key(0), images)["params"]
    found = jax.jit(partial(layers.attention_weights, model))(params, images)[0][0]
    params = jax.tree.map(np.asarray, params)
    block = params["encoder"]["layer_0"]
    patches = np.asarray(extract_patches(images, (8, 8)))
    embedded = patches @ params["embedding"]["kernel"] + params["embedding"]["bias"]
    x = np.concatenate([params["class_token"], embedded], axis=1) + params["pos_embedding"]
    mean = x.mean(-1, keepdims=True)
    y = (x - mean) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    q, k = (y @ block["attention"][name]["kernel"] for name in ("query", "key"))
    heads = [np.split(z[0], 2, axis=1) for z in (q, k)]
    for h in range(2):
        scores = heads[0][h] @ heads[1][h].T / np.sqrt(heads[0][h].shape[1])
        expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        np.testing.assert_allclose(found[h], expected, rtol=1e-4, atol=1e-6)


def test_shapes_of_outputs(source, golden):
    images = pixels(3, 32, 32, 3)
    width = source.model.width
    assert predict(images, source, output="features", layer=0).shape == (3, width)
    dense = predict(images, source, output="dense", image_size=(48, 32))
    assert dense.shape == (3, 6, 4, width)
    last = predict(images, source, output="dense", layer=-1, image_size=(48, 32))
    assert last.shape == dense.shape and np.abs(last - dense).max() > 1e-3  # not yet normalised
    attention = predict(images, source, output="attention", batch_size=8)
    assert attention.shape == (3, source.model.num_heads, 17, 17)


@pytest.mark.slow
def test_layers_of_a_resnet(golden):
    source = read_pretrained(golden / "bit.npz")
    images = pixels(2, 64, 96, 3)
    units = sum(source.model.stages)
    first = predict(images, source, output="dense", layer=0, image_size=(64, 96))
    last = predict(images, source, output="dense", layer=units - 1, image_size=(64, 96))
    assert first.shape[1:3] == (16, 24)
    assert last.shape[-1] == source.model.width
    pooled = predict(images, source, output="features", layer=-1, image_size=(64, 96))
    np.testing.assert_allclose(pooled, last.mean((1, 2)), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=f"layer={units}: the model has {units} layers"):
        predict(images, source, output="dense", layer=units, image_size=64)
    with pytest.raises(InputError, match=r"attention.* BiT has no attention"):
        predict(images, source, output="attention", image_size=64)
    with pytest.raises(InputError, match=r"image_size=None: .*bit\.npz"):
        predict(images, source)


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("output", {"output": "feature"}),
        ("layer", {"layer": 1}),
        ("top", {"top": 0}),
        ("images[0]", {"images": np.zeros((8, 8, 3), np.float32)}),
        ("images[0]", {"images": np.zeros((8, 8, 2), np.uint8)}),
        ("images", {"images": []}),
        ("nowhere.png", {"images": "nowhere.png"}),
    ],
)
def test_wrong_arguments_are_named(source, key, given):
    with at_fault(key):
        predict(**({"images": pixels(8, 8, 3), "source": source} | given))


@pytest.mark.usefixtures("experiments_made_once", "without_checks")
def test_train_evaluate_predict(tmp_path, monkeypatch, json_of):
    digits, labels = load_digits(return_X_y=True)
    digits = np.uint8(np.rint(digits.reshape(-1, 8, 8) * (255 / 16)))
    test, npz = (digits[1437:], labels[1437:]), tmp_path / "test.npz"
    given = {"train": (digits[:1437], labels[:1437]), "test": test}
    config = vit_jax.load_config("quickstart:debug")
    config.checkpoint.every = config.log.every = "2 steps"
    config.model.depth = 1
    config.optimizer.ema_decay = 0.9
    calls = []

    def watch(step, state, metrics):
        calls.append((step, metrics))
        assert not state.ema and "train/loss" in metrics
        if len(calls) == 2:
            raise RuntimeError("of the user's code")

    args = config, tmp_path / "run", {"duration": "4 steps", "stop.metric": None}
    with pytest.raises(RuntimeError, match="of the user"):
        vit_jax.train(*args, callbacks=[watch], data=given)
    with at_fault("data.name"):
        vit_jax.train(*args, data=given | {"train": (digits[:1437], labels[-1437:])})
    summary = vit_jax.train(*args, callbacks=[watch], data=given)
    assert [step for step, _ in calls] == [2, 4, 4] and summary["step"] == 4
    assert calls[2][1]["test/top1"] == summary["test/top1"]
    found = vit_jax.compare([tmp_path / "run"])
    assert (found["runs"], found["config"]) == (["run"], {})
    assert found["metrics"]["test/top1"] == [summary["test/top1"]]
    read = vit_jax.read_metrics(tmp_path / "run")
    assert read["test/top1"][4] == summary["test/top1"] and [*read["train/loss"]] == [2, 4]
    with at_fault(f"{tmp_path}"):
        vit_jax.read_metrics(tmp_path)
    assert config.duration == "40 steps"  # the caller's config is left as it was
    assert vit_jax.train(*args, data=given) == summary
    how = {"overrides": {"evals.test.batch_size": 360}}
    results = vit_jax.evaluate(tmp_path / "run", **how, data={"test": test})
    assert results["test/top1"] == pytest.approx(summary["test/top1"])
    with at_fault("evals.test.split"):
        vit_jax.evaluate(tmp_path / "run")
    np.savez(npz, test_images=test[0], test_labels=test[1])
    words = [f"--workdir={tmp_path / 'run'}", f"--data={npz}", "--config.evals.test.batch_size=360"]
    assert json_of("evaluate", *words)["test/top1"] == results["test/top1"]
    rows = predict(list(digits[:4]), tmp_path / "run", top=1)
    assert [row["file"] for row in rows] == [f"image {i}" for i in range(4)]
    monkeypatch.setattr("vit_jax.inference.evaluate.evaluate_model", lambda *args, **_: args)
    overrides = {"global_batch_size": 40}
    asked, model = vit_jax.evaluate(tmp_path / "run", "evaluate:knn,digits", overrides)
    assert asked.run.global_batch_size == 40
    assert list(asked.evals) == ["knn"] and model.source == str(tmp_path / "run")


def test_wrong_configs_are_answered_before_anything_is_written(tmp_path):
    with at_fault("--config.optimizer.peak_rl"):
        vit_jax.train("quickstart", tmp_path / "run", {"optimizer.peak_rl": 1})
    with at_fault("global_batch_size"):
        vit_jax.train("quickstart", tmp_path / "run", {"global_batch_size": 0})
    with at_fault("plugins"):
        vit_jax.train("quickstart", tmp_path / "run", {"plugins": ["missing.py"]})
    with at_fault("overrides"):
        vit_jax.train("quickstart", tmp_path / "run", ["duration=20 steps"])
    with at_fault("--workdir"):
        vit_jax.evaluate(tmp_path / "run")
    with at_fault("model.name"):
        vit_jax.evaluate(tmp_path, "quickstart")
    assert not list(tmp_path.iterdir())


def test_models_as_nnx_modules_and_back(source):
    """The lines of docs/how_to/python.md."""
    model, params = source.model, params_of(source)
    x = jnp.asarray(RNG.normal(size=(2, 32, 32, 3)), jnp.float32)
    apply = jax.jit(lambda p: [model.apply({"params": p}, x, method=m) for m in (None, "features")])
    expected, features = apply(params)
    vit = nnx.jit(lambda: nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(x))()
    nnx.update(vit, params)

    @nnx.jit
    def compute(m):
        return m(x), m.features(x), nnx.grad(lambda m: jnp.square(m(x)).mean())(m)

    found, found_features, grads = compute(vit)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found_features, features, rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(grads.head.kernel[...]).max()) > 0
    back = nnx.to_pure_dict(nnx.state(vit, nnx.Param))
    np.testing.assert_array_equal(apply(back)[0], expected)

    class Tuned(nnx.Module):
        def __init__(self, rngs):
            self.backbone = nnx.bridge.ToNNX(model, rngs=rngs).lazy_init(x)
            self.head = nnx.Linear(expected.shape[1], 2, rngs=rngs)

        def __call__(self, x):
            return self.head(self.backbone(x))

    linen = nnx.bridge.ToLinen(Tuned)
    variables = jax.jit(linen.init)(jax.random.key(0), x)
    variables["params"]["backbone"] = params
    head = variables["params"]["head"]
    by_hand = expected @ head["kernel"] + head["bias"].reshape(1, -1)
    found = jax.jit(linen.apply)(variables, x)
    np.testing.assert_allclose(found, by_hand, rtol=1e-4, atol=1e-5)


@pytest.fixture
def run_notebook(tmp_path, monkeypatch):
    """Runs the tutorial with the values of its cell of parameters made tiny; gives its names."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    small = {"CONFIG": "quickstart:debug", "STEPS": 4, "TUNING_STEPS": 10}
    return lambda: notebooks.run(notebooks.TUTORIAL, small)


def test_the_notebook_calls_what_there_is(run_notebook, monkeypatch):
    """Its calls fit the functions, and its configs are valid; nothing is computed."""
    configs = []

    def note(config, workdir, overrides=None):
        configs.append(config)
        pathlib.Path(workdir).mkdir(parents=True)
        return {"test/top1": 0.5}

    found = [{"classes": [{"name": "seven"}]}]
    replies = [np.ones((8, 2, 16, 16)), found, np.ones((4, 4, 4, 32))]
    for name, result in (("train", note), ("read_pretrained", None), ("predict", replies)):
        call = create_autospec(getattr(vit_jax, name), side_effect=result)
        monkeypatch.setattr(vit_jax, name, call)
    names = run_notebook()
    assert names["features"].shape == (4, 4, 4, 32) and names["names"] == ["seven"]
    assert [find_faults(config) for config in configs] == [[], []]
    assert pathlib.Path("runs/attention.png").exists()


@pytest.mark.slow
def test_the_notebook_runs(run_notebook):
    names = run_notebook()
    assert names["weights"].shape == (8, 2, 16, 16)
    assert pathlib.Path("runs/attention.png").stat().st_size > 1000
    assert names["features"].shape == (4, 4, 4, 32)
    assert len(names["names"]) == 179  # the sevens


def test_the_page_on_python_calls_what_there_is(monkeypatch, capsys):
    """Its calls fit the functions; its callback runs."""
    state = types.SimpleNamespace(params={"kernel": jnp.full((2, 2), 2.0)})

    def note(config, workdir, overrides=None, callbacks=()):
        for callback in callbacks:
            callback(7, state, {"test/top1": 0.5})
        return {"test/top1": 0.5}

    found = {
        "runs": [], "config": {}, "metrics": {"val/top1": [0.9]}, "rows": [], "best": "",
        "train/loss": {1: 2.0},
        "read_back": 0.0, "memory_bytes": {"fits": True}, "estimate": {"run": {"hours": 1.0}},
    }  # fmt: skip
    for name in ("train", "evaluate", "branch", "compare", "plan", "read_metrics", "study",
                 "export", "figures"):  # fmt: skip
        result = {"side_effect": note} if name == "train" else {"return_value": found}
        monkeypatch.setattr(vit_jax, name, create_autospec(getattr(vit_jax, name), **result))
    text = (notebooks.ROOT / "docs/how_to/python.md").read_text()
    *blocks, _, _, _, _ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 3 and "7 0.5 4.0" in capsys.readouterr().out


def test_no_run_to_go_on_with(tmp_path):
    with at_fault("--workdir"):
        vit_jax.train(None, tmp_path)
