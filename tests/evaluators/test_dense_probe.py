"""Probes of patch features, from the public function to the metrics, against scikit-learn."""

import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, jaccard_score, root_mean_squared_error
from sklearn.preprocessing import StandardScaler

import vit_jax
from vit_jax.base.errors import InputError
from vit_jax.evaluators.dense_probe import check_shared, find_targets

SIDE, SHAPES = 32, ((48, 40), (40, 48))  # that a model of squares sees; of even and odd scenes
TRAIN, TEST, SAMPLES = range(12), range(20, 25), 16


def scene(seed):
    """A picture, its mask with the classes 1 to 3 and unknown edges, and its depth in mm."""
    rng, (height, width) = np.random.default_rng(seed), SHAPES[seed % 2]
    mask = np.ones((height, width), np.uint8)
    for value in (2, 3):
        y, x = rng.integers(0, (height - 18, width - 16))
        mask[y : y + 18, x : x + 16] = value
    colours = np.array([[0, 0, 0], [40, 90, 200], [200, 60, 60], [90, 200, 60]])
    picture = (colours[mask] + rng.integers(-20, 20, (height, width, 1))).clip(0, 255)
    depth = 1000 * (1 + (mask == 3)) + np.arange(height)[:, None]  # a linear layer overshoots
    mask[:2], depth[:, :3] = 0, 0
    return picture.astype(np.uint8), mask, depth.astype(np.uint16)


def as_square(picture):
    rows, columns = (np.arange(SIDE) * side // SIDE for side in picture.shape[:2])
    return picture[rows][:, columns]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("scenes")
    for split, seeds in (("training", TRAIN), ("validation", TEST)):
        for seed in seeds:
            images = (as_square(scene(seed)[0]), *scene(seed))
            folders = ("images", "pictures", "masks", "depths")
            for folder, image in zip(folders, images, strict=True):
                (root / folder / split).mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(root / folder / split / f"{seed}.png")
    of_pictures = {"max_tokens": 35, "pool": "gap", "registers": 2}  # 30 patches, and padding
    for name, form, fields in (("squares.npz", "npz", {}), ("native", "timm", of_pictures)):
        model = vit_jax.create_model("ViT-mu/8", image_size=SIDE, num_classes=None, **fields)
        variables = model.init(jax.random.key(0), jnp.zeros((1, SIDE, SIDE, 3)))
        vit_jax.save_pretrained(root / name, model, variables, format=form)
    return root


def evaluate(root, words, model="squares.npz", **changes):
    wanted = {
        "data.data_dir": root / "images", "global_batch_size": 8,
        "evals.segmentation.targets": root / "masks", "evals.depth.targets": root / "depths",
        "evals.segmentation.num_patches": 100, "evals.depth.num_patches": 100,
    }  # fmt: skip
    given = {key: str(v) if "dir" in key or "targets" in key else v for key, v in wanted.items()}
    given = {k: v for k, v in given.items() if "evals" not in k or k.split(".")[1] in words}
    return vit_jax.evaluate(root / model, f"evaluate:{words},unlabelled", given | changes)


def pixels(values):
    """The values of all pixels of the test scenes, one after another."""
    return np.concatenate([np.asarray(each).ravel() for each in values])


@pytest.mark.parametrize("form", [pytest.param("squares.npz", marks=pytest.mark.slow), "native"])
def test_probes_are_those_of_scikit_learn(form, root):
    words = ("segmentation", "depth")
    own_shape = {"data.data_dir": str(root / "pictures")}
    own_shape |= {f"evals.{word}.ops": "decode" for word in words}
    found = evaluate(root, ",".join(words), form, **own_shape if form == "native" else {})
    model = vit_jax.read_pretrained(root / form)

    def features(seeds):
        pictures = [scene(seed)[0] for seed in seeds]
        if form != "native":
            pictures = [as_square(picture) for picture in pictures]
        return vit_jax.predict(pictures, model, output="dense")

    trained, tests = features(TRAIN), features(TEST)
    shapes = {"squares.npz": [(4, 4)] * 2, "native": [(6, 5), (5, 6)]}[form]
    assert [x.shape[:2] for x in trained] == [shapes[seed % 2] for seed in TRAIN]
    x, of_tests = (
        np.concatenate([each.reshape(-1, model.model.width) for each in maps]).astype(np.float64)
        for maps in (trained, tests)
    )
    scaler = StandardScaler().fit(x)
    white, white_tests = scaler.transform(x), scaler.transform(of_tests)

    def of_patches(target, seed):
        """(patches, pixels): what lies in each patch of a scene."""
        rows, columns = shapes[seed % 2]
        y, x = (np.arange(n * SAMPLES) * side // (n * SAMPLES)
                for n, side in zip((rows, columns), target.shape, strict=True))  # fmt: skip
        grid = target[y][:, x].reshape(rows, SAMPLES, columns, SAMPLES)
        return grid.swapaxes(1, 2).reshape(rows * columns, -1)

    def interpolated(outputs):
        ends = np.cumsum([x.shape[0] * x.shape[1] for x in tests])
        for seed, rows in zip(TEST, np.split(outputs, ends[:-1]), strict=True):
            map = rows.reshape(*shapes[seed % 2], -1)
            yield jax.image.resize(map, (*SHAPES[seed % 2], map.shape[-1]), "linear")

    masks = np.concatenate([of_patches(scene(seed)[1], seed) for seed in TRAIN])
    shares = np.stack([(masks == value).mean(axis=1) for value in (1, 2, 3)], axis=1)
    row, label = np.nonzero(shares)
    probe = LogisticRegression(C=1 / (1e-4 * shares.sum()), tol=1e-8, max_iter=10_000)
    probe.fit(white[row], label, sample_weight=shares[row, label])
    outputs = interpolated(probe.decision_function(white_tests))
    predicted = pixels(np.argmax(map, axis=-1) + 1 for map in outputs)
    truth = pixels(scene(seed)[1] for seed in TEST)
    known = truth > 0
    miou = jaccard_score(truth[known], predicted[known], average="macro")
    assert found["segmentation/miou"] == pytest.approx(miou, abs=2e-3) and 0.4 < miou < 1
    accuracy = accuracy_score(truth[known], predicted[known])
    assert found["segmentation/pixel_accuracy"] == pytest.approx(accuracy, abs=2e-3)

    depths = np.concatenate([of_patches(scene(seed)[2], seed) for seed in TRAIN]) / 1000
    mean = depths.sum(axis=1) / (depths > 0).sum(axis=1)
    ridge = Ridge(alpha=1e-4 * len(white)).fit(white, mean)
    truth = pixels(scene(seed)[2] for seed in TEST) / 1000
    predicted = pixels(interpolated(ridge.predict(white_tests)))
    known, predicted = truth > 0, predicted.clip(depths[depths > 0].min(), depths.max())
    error = predicted[known] - truth[known]
    assert found["depth/rmse"] == pytest.approx(
        root_mean_squared_error(truth[known], predicted[known]), rel=1e-3
    )
    assert found["depth/abs_rel"] == pytest.approx((abs(error) / truth[known]).mean(), rel=1e-3)
    ratio = predicted[known] / truth[known]
    assert found["depth/delta1"] == pytest.approx(((ratio < 1.25) & (ratio > 0.8)).mean(), abs=2e-3)


TARGETS = pathlib.Path(__file__).with_name("targets.txt").read_text().splitlines()[1:]


@pytest.mark.parametrize("case", TARGETS)
def test_targets_are_found_by_the_path_below_the_split(case, tmp_path):
    folder, *others = re.fullmatch("(.*): (.*); (.*) -> (.*)", case).groups()
    names, masks, found = map(str.split, others)
    for mask in masks:
        (tmp_path / mask).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / mask).touch()
    source = types.SimpleNamespace(
        name="unlabelled", split="val", num_examples=len(names),
        file_names=lambda start, stop: names[start:stop],
        record_name=lambda record: str(pathlib.PurePath(folder, names[record])),
    )  # fmt: skip
    if found == ["none"]:
        with pytest.raises(InputError, match="targets="):
            find_targets(str(tmp_path), source)
    else:
        assert find_targets(str(tmp_path), source) == [tmp_path / path for path in found]


def test_a_target_is_not_of_two_splits(tmp_path):
    """masks/1.png, for images train/1.jpg and val/1.jpg; the same image twice has one mask."""
    sources = {split: types.SimpleNamespace(
        name="unlabelled", record_name=lambda record, split=split: f"{split}/1.jpg",
    ) for split in ("train", "val")}  # fmt: skip
    files = {split: [tmp_path / "1.png"] for split in sources}
    with pytest.raises(InputError, match=r"1.png is the target of train/1.jpg and of val/1.jpg"):
        check_shared(files, sources)
    check_shared(files, dict.fromkeys(sources, sources["val"]))


def test_targets_of_data_without_folders_are_those_of_its_split(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "1.png").touch()
    source = types.SimpleNamespace(
        name="tar", split="val[:50%]", num_examples=1, file_names=lambda *_: ["1.jpg"],
        record_name=lambda record: "val-0.tar member 1 (record 0 of 1)",
    )  # fmt: skip
    assert find_targets(str(tmp_path), source) == [tmp_path / "val/1.png"]


@pytest.mark.slow
def test_targets_that_cannot_be_read_are_named(root, tmp_path):
    for changes, fault in (
        ({"evals.segmentation.targets": str(tmp_path)}, "5 of the 5 images of val"),
        ({"evals.segmentation.targets": str(root)}, "several: 20, 21"),
        ({"evals.segmentation.targets": str(root / "depths")}, ".png: got uint16 (48, 40)"),
        ({"evals.segmentation.ops": "decode|resize(40)|central_crop"}, "central_crop keeps a part"),
    ):
        with pytest.raises(InputError, match=re.escape(fault)):
            evaluate(root, "segmentation", **changes)


@pytest.mark.slow
def test_masks_of_stored_pixels_give_what_upright_ones_give(root, tmp_path, caplog):
    """Photos with EXIF orientations 6 and 2, and masks by a tool that does not read EXIF."""
    exif, scores = Image.Exif(), {}
    for turned in (False, True):
        for split, seeds in (("training", range(2)), ("validation", range(20, 22))):
            for seed in seeds:
                mask = Image.fromarray(scene(seed)[1])
                picture = Image.fromarray(scene(seed)[0]).resize(mask.size)
                exif[0x0112] = 6 if turned else 1
                for folder, image in (("images", picture), ("masks", mask)):
                    image = image.transpose(Image.Transpose.ROTATE_90) if turned else image
                    path = tmp_path / str(turned) / folder / split / f"{seed}.png"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    image.save(path, **({"exif": exif} if folder == "images" else {}))
        places = {"data.data_dir": str(tmp_path / str(turned) / "images"),
                  "evals.segmentation.targets": str(tmp_path / str(turned) / "masks")}  # fmt: skip
        scores[turned] = evaluate(root, "segmentation", **places)
    assert scores[True] == scores[False]
    assert "targets: " not in caplog.text
