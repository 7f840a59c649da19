"""Figures of a model: their numbers in closed cases, their text, and the command."""

import csv
import json

import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from matplotlib.text import Text
from PIL import Image

import vit_jax
from vit_jax import create_model, predict, read_pretrained
from vit_jax.evaluators.features import principal_components
from vit_jax.insight import attention_maps as maps
from vit_jax.insight import figures, measured, plots
from vit_jax.insight.measured import alignment, gram_matrix
from vit_jax.main import main
from vit_jax.transfer.pretrained import Pretrained, Spec

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")

RNG = np.random.default_rng(0)


def test_distances_of_uniform_and_of_diagonal_attention():
    distances = maps.patch_distances((2, 3), (16, 8))  # centres at 0, 16 px and 0, 8, 16 px
    assert distances[0].tolist() == pytest.approx([0, 8, 16, 16, 320**0.5, 512**0.5])
    uniform, diagonal = np.full((7, 7), 1 / 7), np.eye(7)
    half_to_prefix = np.block([[1, np.zeros(6)], [np.full((6, 1), 0.5), np.full((6, 6), 1 / 12)]])
    to_neighbour = np.zeros((7, 7))
    to_neighbour[:, 2] = 1  # patch 1
    weights = jnp.asarray(np.stack([uniform, diagonal, half_to_prefix, to_neighbour]))[None]
    found = maps.mean_distance(weights, distances)[0]
    expected = [distances.mean(), 0, distances.mean(), distances[:, 1].mean()]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    shares = maps.prefix_share(weights, 1)[0]
    np.testing.assert_allclose(shares, [1 / 7, 0, 0.5, 0], atol=1e-6)
    np.testing.assert_allclose(maps.mean_entropy(weights)[0, :2], [np.log2(7), 0], rtol=1e-5)


def test_rollout_of_the_identity_and_of_two_layers():
    identity = jnp.eye(3)[None, None]
    rolled = maps.rollout_step(identity, maps.rollout_step(identity, None))
    np.testing.assert_allclose(rolled[0], np.eye(3))
    first, second = (RNG.dirichlet(np.ones(3), (1, 2, 3)) for _ in range(2))
    by_hand = np.eye(3)
    for weights in (first, second):
        by_hand = (weights[0].mean(axis=0) + np.eye(3)) / 2 @ by_hand
    found = maps.rollout_step(jnp.asarray(second), maps.rollout_step(jnp.asarray(first), None))
    np.testing.assert_allclose(found[0], by_hand, rtol=1e-5)
    np.testing.assert_allclose(found.sum(axis=-1), 1, rtol=1e-5)


def test_tokens_that_the_head_classifies():
    small = {"width": 16, "depth": 1, "mlp_dim": 16, "num_heads": 2}
    for name, fields, expected in (
        ("ViT-Ti/16", {}, [1, 0, 0]),
        ("ViT-Ti/16", {"pool": "gap"}, [0.5, 0.5]),
        ("DeiT-Ti/16", {}, [0.5, 0.5, 0, 0]),
    ):
        model = create_model(name, 3, (16, 32), **small, **fields)
        assert maps.token_shares(model).tolist() == expected
    weights = jnp.arange(9.0).reshape(3, 3)
    assert maps.over_patches(weights, np.array([1.0, 0, 0]), (1, 2)).tolist() == [[1, 2]]


def test_similarity_of_sin_cos_positions():
    grid, width = (3, 5), 32
    fields = {"width": width, "depth": 1, "mlp_dim": 16, "num_heads": 2, "pos_embed": "sincos_2d"}
    model = create_model("ViT-Ti/8", 3, (24, 40), **fields)
    _, numbers = figures.FIGURES["positions"](
        figures.Subject(Pretrained("", model, {}, Spec((24, 40), "")))
    )
    found = numbers["stem"]
    rows, columns = np.mgrid[: grid[0], : grid[1]].reshape(2, -1)
    frequencies = 10000.0 ** -(np.arange(width // 4) / (width // 4 - 1))
    expected = np.mean(
        [np.cos((x[:, None] - x[None])[..., None] * frequencies) for x in (rows, columns)],
        axis=(0, -1),
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_components_of_filters_of_a_known_basis():
    basis = np.linalg.qr(RNG.normal(size=(12, 12)))[0][:, :3].T
    basis *= np.sign(np.take_along_axis(basis, np.abs(basis).argmax(1)[:, None], axis=1))
    weights = np.array([[5, 0, 0], [-5, 0, 0], [0, 3, 0], [0, -3, 0], [0, 0, 1], [0, 0, -1]])
    components, shares = principal_components(weights @ basis + 7.0, 28)
    np.testing.assert_allclose(components, basis, atol=1e-8)
    np.testing.assert_allclose(shares, np.array([25, 9, 1]) / 35)
    # As filters of a model: a filter is a column of the embedding, (row, column, channel).
    model = create_model("ViT-Ti/2", 3, (4, 4), width=16, depth=1, mlp_dim=16, num_heads=2)
    kernel = RNG.normal(size=(12, 16)).astype(np.float32)
    found = figures.filters_of(
        Pretrained("", model, {"embedding/kernel": kernel}, Spec((4, 4), ""))
    )
    assert found.shape == (16, 2, 2, 3)
    assert found[5, 1, 0, 2] == kernel[2 * 3 + 2, 5]


def test_alignment_ignores_rotation_shift_and_scale():
    x = RNG.normal(size=(2, 12, 5)).astype(np.float32)
    rotation = np.linalg.qr(RNG.normal(size=(5, 5)))[0].astype(np.float32)
    turned = 3 * x @ rotation + 10
    other = RNG.normal(size=(2, 12, 4, 20)).astype(np.float32)
    batches = [
        np.stack([gram_matrix(jnp.asarray(layer[i])) for layer in (x, turned, other)])
        for i in range(2)
    ]
    found = alignment(batches, batches)
    np.testing.assert_allclose(np.diag(found), 1, rtol=1e-6)
    assert found[0, 1] == pytest.approx(1, abs=1e-4)
    assert abs(found[0, 2]) < 0.3
    # The estimate of HSIC by its definition, with a centring matrix that leaves the diagonal out.
    k, m = (batches[0][i].astype(np.float64) for i in (0, 2))
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    n, ones = 12, np.ones(12)

    def hsic(a, b):
        total = np.trace(a @ b) + ones @ a @ ones * (ones @ b @ ones) / ((n - 1) * (n - 2))
        return (total - 2 / (n - 2) * (ones @ a @ b @ ones)) / (n * (n - 3))

    expected = hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))
    assert alignment(batches[:1], batches[:1])[0, 2] == pytest.approx(expected, rel=1e-6)


def test_outliers_are_counted_among_patches():
    norms = np.ones((2, 6))
    norms[:, 0] = 50  # the class token
    norms[0, 3] = 4
    seen = measured.Measured([], [norms], [], images=[], features=[])
    table = measured.norm_table(seen, num_prefix=1, factor=3)
    assert table["outlier_share"].tolist() == [0.1]
    assert (table["largest"][0], table["prefix"][0], table["median"][0]) == (4, 50, 1)


@pytest.mark.slow
def test_text_is_whole_and_legible():
    by_head = RNG.random((24, 16)) * 100
    images = RNG.integers(0, 255, (2, 24, 40, 3)).astype(np.uint8)
    where = "class and distillation token"
    table = {name: RNG.random(24) + 1 for name in ("median", "p5", "p95", "largest", "prefix")}
    labels = "uniform over 1,000 tokens", "attention distance (px of 224 x 224)"
    with plots.paper_style():
        drawn = [
            plots.draw_heads_by_layer(by_head, by_head / 9, 80.0, *labels),
            plots.draw_positions(RNG.random((16, 16)), (4, 4), "positions of layer 0 of 12"),
            plots.draw_similarity(by_head / 100, ("layer of model_a", "layer of model_b")),
            plots.draw_norms(table | {"outlier_share": np.zeros(24)}, 3),
            plots.draw_heads(images[0], RNG.random((24, 16, 6, 10)), where),
            plots.draw_rollouts(images, RNG.random((2, 6, 10)), where),
        ]
        for form, start in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
            assert plots.as_file(drawn[3], form).startswith(start)
        for figure in drawn:
            for _ in range(2):  # as in `as_file`
                figure.draw_without_rendering()
            width, height = figure.get_size_inches()
            box = figure.get_tightbbox()  # in inches, of all that is drawn
            assert width == plots.WIDTH
            assert min(box.x0, box.y0) > -0.01
            assert box.x1 < width + 0.01 and box.y1 < height + 0.01
            assert {text.get_fontsize() for text in figure.findobj(Text)} == {plots.FONT_SIZE}


@pytest.mark.parametrize("value", [0.5, 9.0])
def test_the_line_of_uniform_attention_is_visible(value):
    """Also for local heads, whose distances and entropies are all far below it."""
    by_head = np.full((2, 3), value)
    figure = plots.draw_heads_by_layer(by_head, by_head / 9, 4.0, "uniform", "bits")
    bottom, top = figure.axes[0].get_ylim()
    assert bottom == 0 and top > 4


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for i in range(5):
        pixels = RNG.integers(0, 256, (40, 32, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    (folder / "broken.png").write_bytes(b"not an image")
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    """Files hold the name of their form: drawing takes half the time, and has tests above."""
    monkeypatch.setattr(plots, "as_file", lambda figure, form="png": form.encode())


def run(capsys, *words):
    code = main(["figures", "--batch_size=8", "--quiet", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.usefixtures("undrawn")
def test_every_figure_of_a_deit(golden, images, tmp_path, capsys):
    source, output = golden / "hf_deit", tmp_path / "figures"
    words = (f"--init_from={source}", f"--output={output}", "--format=json", "--shown=2")
    code, out, _ = run(capsys, *words, f"--compare_to={golden / 'hf_vit'}", images)
    said = json.loads(out)
    assert code == 0 and said["left_out"] == {} and set(said["figures"]) == set(figures.FIGURES)
    files = [file for made in said["figures"].values() for file in made]
    assert sorted(files) == sorted(path.name for path in output.iterdir())
    assert {"heads_1.png", "heads_2.png"} < set(files) and "heads_3.png" not in files
    # The maps are those of `predict`'s weights, and the averages are over the readable images.
    paths = [images / f"{i}.png" for i in range(5)]
    read = read_pretrained(source)
    weights = [predict(paths, read, output="attention", layer=i) for i in range(read.model.depth)]
    with np.load(output / "heads.npz") as file:
        expected = np.stack(weights, axis=1)[[0, 3], :, :, :2, 2:].mean(axis=3)  # spread
        np.testing.assert_allclose(file["attention"].reshape(expected.shape), expected, atol=1e-5)
        assert file["name"].tolist() == [str(paths[0]), str(paths[3])]
    rows = list(csv.DictReader((output / "distance.csv").read_text().splitlines()))
    distances = maps.patch_distances((4, 4), (8, 8))
    by_hand = np.asarray(maps.mean_distance(jnp.asarray(weights[1]), distances))
    last = next(row for row in rows if (row["layer"], row["head"]) == ("1", "0"))
    assert float(last["distance_px"]) == pytest.approx(by_hand[:, 0].mean(), rel=1e-4)
    assert float(last["deviation_px"]) == pytest.approx(np.std(by_hand[:, 0], ddof=1), rel=1e-3)


@pytest.mark.usefixtures("undrawn")
def test_what_a_model_lacks_is_said(golden, images, tmp_path, capsys):
    words = (f"--output={tmp_path}", "--image_size=48", f"--init_from={golden / 'bit.npz'}")
    code, out, _ = run(capsys, *words, "--figures=filters.pdf,positions,rollout,norms", images)
    assert code == 0 and (tmp_path / "filters.pdf").read_bytes() == b"pdf"
    assert "filters.pdf: filters.npz, filters.pdf" in out and "norms: norms.csv" in out
    assert "positions: left out: a BiT has no position embedding" in out
    assert "rollout: left out: a BiT has no attention" in out
    assert not (tmp_path / "rollout.png").exists()


@pytest.mark.usefixtures("undrawn")
def test_parameters_need_no_image(golden, tmp_path, capsys):
    words = (f"--init_from={golden / 'hybrid_root.npz'}", f"--output={tmp_path / 'new'}")
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert "distance: left out: needs images; give files, folders or --data" in out
    with np.load(tmp_path / "new/filters.npz") as file:
        assert file["components"].shape[1:] == (7, 7, 3)
        np.testing.assert_allclose(file["filters"].mean(axis=(1, 2, 3)), 0, atol=1e-5)
    assert (tmp_path / "new/positions.png").exists()
    of_image = {"names": ["positions", "norms"], "images": np.zeros((40, 40, 3), np.uint8)}
    made = vit_jax.figures(golden / "hybrid_root.npz", tmp_path / "python", **of_image)
    assert list(made["figures"]) == ["positions", "norms"] and not made["left_out"]
    new, again = (np.load(tmp_path / name / "positions.npz") for name in ("new", "python"))
    assert all(np.array_equal(new[key], again[key]) for key in new)
    with at_fault("names"):
        vit_jax.figures(golden / "hybrid_root.npz", tmp_path / "python", names=["norm"])
