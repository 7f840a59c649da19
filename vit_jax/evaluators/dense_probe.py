"""Linear probes of frozen patch features: the class, or the depth, of every pixel.

Axes: B images of a batch, R rows and S columns of patches, D features, N patches to learn from,
Q their pixels, C outputs, H and W height and width of a target in pixels.
Source: Oquab et al. 2023 (arXiv:2304.07193), section 7.4: a linear layer on the patch tokens, whose
  outputs are interpolated to the pixels.
"""

import collections
import itertools
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from PIL import Image

from vit_jax.base.errors import Faults, InputError, collect_faults, few, shown
from vit_jax.base.pictures import Images, cut_out
from vit_jax.base.tree import Batch
from vit_jax.config import POSITIVE, key
from vit_jax.config.evals import Better
from vit_jax.data import Source
from vit_jax.data.division import DIVIDED
from vit_jax.data.images.files import split_of
from vit_jax.data.retries import retried
from vit_jax.evaluators.features import FeatureEvaluator, NothingToMeasureError, fit_whitening
from vit_jax.evaluators.inputs import EvalInputs, Measure, fetch
from vit_jax.evaluators.linear_probe import Classifier, fit_or_warn, split_over_devices
from vit_jax.evaluators.upright import Upright
from vit_jax.experiment.state import TrainState

_SAMPLES = 16  # pixels of a target along each side of a patch that is learned from
_VALUES = 256  # of a mask

# (output (H, W, C), target (H, W)) of each test image -> sums over their pixels.
Score = Callable[[Iterable[tuple[np.ndarray, np.ndarray]]], np.ndarray]


class DenseProbe(FeatureEvaluator):
    """An evaluator that learns something of every pixel from the features of patches."""

    targets: str = key(..., "folder with a file for each image, of the same name")
    num_patches: int = key(
        64, "patches of a training image to learn from, drawn at random", within=POSITIVE
    )
    l2: float = key(1e-4, "weight of half the squared norm", within=POSITIVE)

    multi_label = None

    def read_target(self, path: pathlib.Path) -> np.ndarray:
        """The target (H, W) in a file, float; NaN where a pixel does not count.

        Raises: ValueError if the file has another form.
        """
        raise NotImplementedError

    def learn(
        self, inputs: EvalInputs, x_ND: np.ndarray, target_NQ: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Score]:
        """Kernel (D, C) and bias (C,) learned from whitened features; how the outputs score."""
        raise NotImplementedError

    def results(self, sums: np.ndarray) -> dict[str, float]:
        """The metrics, by what `Score` gives for all images."""
        raise NotImplementedError

    def bind(self, inputs: EvalInputs) -> Measure:
        _check(inputs)
        files = {k: find_targets(self.targets, source) for k, source in inputs.sources.items()}
        check_shared(files, inputs.sources)
        upright = Upright(inputs)

        @inputs.jit
        def compute(state: TrainState, batch: Batch) -> tuple[Images, jax.Array, jax.Array]:
            return inputs.maps(state, batch["image"]), batch["id"], batch["mask"]

        def maps(state: TrainState, split_key: str) -> Iterator[tuple[np.ndarray, int]]:
            """The features (R, S, D) and the record of each image."""
            batches = inputs.batches(split_key)
            for x_BRSD, id_B, mask_B in fetch(compute(state, batch) for batch in batches):
                for x_RSD, i, weight in zip(cut_out(x_BRSD), id_B, mask_B, strict=True):
                    if weight > 0:
                        yield x_RSD, int(i)

        def target(split_key: str, record: int) -> np.ndarray:
            file = files[split_key][record]
            return upright(self._read(file), file, split_key, record)

        def measure(state: TrainState) -> dict[str, float]:
            parts = [
                self._draw(x_RSD, target("train_split", i), files["train_split"][i].name)
                for x_RSD, i in maps(state, "train_split")
            ]
            x_ND, target_NQ = map(np.concatenate, zip(*parts, strict=True))
            known_N = ~np.isnan(target_NQ).all(axis=1)
            if not known_N.any():
                raise NothingToMeasureError("train_split: no pixel of its targets counts")
            whiten = fit_whitening(x_ND[known_N])
            learned = self.learn(inputs, whiten(x_ND[known_N]), target_NQ[known_N])
            kernel_DC, bias_C, score = learned

            def pairs(x_RSD: np.ndarray, record: int) -> tuple[np.ndarray, np.ndarray]:
                target_HW = target("test_split", record)
                return interpolate(whiten(x_RSD) @ kernel_DC + bias_C, target_HW.shape), target_HW

            tests = maps(state, "test_split")
            mine = itertools.islice(tests, jax.process_index(), None, jax.process_count())
            sums = score(itertools.starmap(pairs, mine))
            upright.warn()
            bits = multihost_utils.process_allgather(sums.view(np.int32))  # JAX has no int64
            return self.results(bits.reshape(-1, bits.shape[-1]).view(sums.dtype).sum(axis=0))

        return measure

    def _draw(
        self, x_RSD: np.ndarray, target_HW: np.ndarray, name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Features, and pixels of the target, of some patches of an image; (n, D), (n, Q)."""
        rows, columns, width = x_RSD.shape
        y, x = (np.arange(n * _SAMPLES) * side // (n * _SAMPLES)
                for n, side in zip((rows, columns), target_HW.shape, strict=True))  # fmt: skip
        target = target_HW[y][:, x].reshape(rows, _SAMPLES, columns, _SAMPLES)
        target_NQ = target.swapaxes(1, 2).reshape(rows * columns, -1)
        seed = np.frombuffer(name.encode(), np.uint8)
        drawn = np.random.default_rng(seed).permutation(rows * columns)[: self.num_patches]
        return x_RSD.reshape(-1, width)[drawn], target_NQ[drawn]

    def _read(self, file: pathlib.Path) -> np.ndarray:
        """As `read`; raises InputError, which names the file."""
        try:
            return retried(lambda: self.read_target(file), file)
        except (OSError, ValueError) as e:  # Pillow's are OSErrors
            raise InputError(f"targets: {shown(file)}: {e}") from None


class Segmentation(DenseProbe):
    """Mean intersection over union of a linear classifier of patches.

    A target is a mask, as in ADE20k: a PNG of 8 bits whose values are classes. For each
    class, its intersection over union is pixels of both / pixels of either, over all test images;
    `miou` is the mean over the classes that occur in targets or predictions, and `pixel_accuracy`
    the share of pixels that are right.

    Multinomial logistic regression on whitened features: a patch counts for each of its classes as
    much as it has pixels of it, so the loss is its pixels' loss.
    """

    ignored: tuple[int, ...] = key(
        (0,), "values of pixels that do not count: ADE20k 0, VOC and Cityscapes 255",
        within="[0, 255]",
    )  # fmt: skip

    def reports(self) -> dict[str, Better]:
        return {"miou": "higher", "pixel_accuracy": "higher"}

    def read_target(self, path: pathlib.Path) -> np.ndarray:
        mask_HW = np.asarray(Image.open(path))
        if mask_HW.ndim != 2 or mask_HW.dtype != np.uint8:
            found = f"{mask_HW.dtype} {mask_HW.shape}"
            raise ValueError(f"got {found}; needs a PNG with one value of 8 bits a pixel")
        return np.where(np.isin(mask_HW, self.ignored), np.nan, mask_HW)

    def learn(
        self, inputs: EvalInputs, x_ND: np.ndarray, target_NQ: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Score]:
        classes = np.unique(target_NQ[~np.isnan(target_NQ)])
        share_NC = np.stack([(target_NQ == value).mean(axis=1) for value in classes], axis=1)
        patch, label = np.nonzero(share_NC)  # a row for each class of a patch
        columns = (x_ND[patch], label.astype(np.int32), share_NC[patch, label])
        x, labels, shares = (
            split_over_devices(inputs.mesh, column.astype(kind))
            for column, kind in zip(columns, (np.float32, np.int32, np.float32), strict=True)
        )
        start = Classifier(jnp.zeros((x_ND.shape[1], len(classes))), jnp.zeros(len(classes)))

        def score(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
            counts = np.zeros(_VALUES**2, np.int64)
            for output_HWC, target_HW in pairs:
                known = ~np.isnan(target_HW)
                predicted = classes[output_HWC[known].argmax(axis=-1)]
                places = (target_HW[known] * _VALUES + predicted).astype(np.int64)
                counts += np.bincount(places, minlength=len(counts))
            return counts

        return *jax.device_get(fit_or_warn(x, labels, shares, self.l2, start)), score

    def results(self, sums: np.ndarray) -> dict[str, float]:
        confusion = sums.reshape(_VALUES, _VALUES)
        both = confusion.diagonal()
        either = confusion.sum(axis=0) + confusion.sum(axis=1) - both
        occurs = either > 0
        if not occurs.any():
            raise NothingToMeasureError("test_split: no pixel of its targets counts")
        ious = both[occurs] / either[occurs]
        return {"miou": float(ious.mean()), "pixel_accuracy": float(both.sum() / confusion.sum())}


class Depth(DenseProbe):
    """Errors of depths that a linear layer predicts from patches.

    A target is a PNG of 16 bits, with 0 where the depth is unknown, or a .npy in metres, with 0 or
    NaN there. Least squares with the weight `l2` of the squared norm learns the mean depth of a
    patch from whitened features; predictions are clipped to the depths of the training patches.
    Over all pixels: `rmse` in metres, `abs_rel` the mean of |error| / depth, and `delta1` the share
    with max(prediction / depth, depth / prediction) < 1.25.

    Source: Eigen et al. 2014 (arXiv:1406.2283), section 4.
    """

    per_metre: float = key(1000.0, "units of a PNG; NYU 1000, KITTI 256", within=POSITIVE)

    def reports(self) -> dict[str, Better]:
        return {"rmse": "lower", "abs_rel": "lower", "delta1": "higher"}

    def read_target(self, path: pathlib.Path) -> np.ndarray:
        if path.suffix == ".npy":
            depth_HW = np.load(path, allow_pickle=False).astype(np.float64)
        else:
            depth_HW = np.asarray(Image.open(path)) / self.per_metre
        if depth_HW.ndim != 2:
            raise ValueError(f"got an array {depth_HW.shape}; needs one depth a pixel")
        return np.where(depth_HW > 0, depth_HW, np.nan)

    def learn(
        self, inputs: EvalInputs, x_ND: np.ndarray, target_NQ: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Score]:
        depth_N = np.nanmean(target_NQ, axis=1)
        mean = x_ND.mean(axis=0)
        centred = x_ND - mean
        gram = centred.T @ centred / len(x_ND) + self.l2 * np.eye(x_ND.shape[1])
        kernel_D = np.linalg.solve(gram, centred.T @ (depth_N - depth_N.mean()) / len(x_ND))
        bias = depth_N.mean() - mean @ kernel_D
        limits = np.nanmin(target_NQ), np.nanmax(target_NQ)

        def score(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
            sums = np.zeros(4)
            for output_HWC, target_HW in pairs:
                known = ~np.isnan(target_HW)
                depth, predicted = target_HW[known], output_HWC[known][:, 0].clip(*limits)
                error = predicted - depth
                ratio = np.maximum(predicted / depth, depth / predicted)
                sums += [len(depth), np.square(error).sum(), (abs(error) / depth).sum(),
                         (ratio < 1.25).sum()]  # fmt: skip
            return sums

        return kernel_D[:, None], np.array([bias]), score

    def results(self, sums: np.ndarray) -> dict[str, float]:
        number, squares, relative, near = sums
        if not number:
            raise NothingToMeasureError("test_split: no pixel of its targets counts")
        return {"rmse": float(np.sqrt(squares / number)), "abs_rel": float(relative / number),
                "delta1": float(near / number)}  # fmt: skip


def find_targets(folder: str, source: Source) -> list[pathlib.Path]:
    """The file below `folder` for each record of `source`, by the names of both.

    Names count without their endings; where several files have the name, with their folders. Above
    and including a folder that names a split, such as `val/` or `train2017/`, folders do not count,
    but a file of another split is no target.

    Raises: InputError naming what is missing or ambiguous.
    """
    root = pathlib.Path(folder).expanduser()
    if source.file_names is None:
        raise InputError(f"targets: {source.name} {source.split} does not know its images' names; "
                         "use images in files")  # fmt: skip
    by_name = collections.defaultdict(list)
    for path in root.rglob("*"):
        if path.suffix.lower() in (".png", ".npy"):
            by_name[path.stem].append((path, *_below_split(path.relative_to(root))))
    # Images of train/ may be held out for val, where a run divides them.
    usual = None if source.name in DIVIDED else split_of(source.split.partition("[")[0])
    found, faults, taken = [], [], set[pathlib.Path]()
    for record, name in enumerate(source.file_names(0, source.num_examples)):
        from_root = pathlib.PurePath(source.record_name(record))
        split, _ = _below_split(from_root)
        _, below = _below_split(pathlib.PurePath(name))
        splits = (None, split or usual)
        files = [each for each in by_name[below.name] if each[1] in splits or splits[1] is None]
        if len(files) > 1:
            length = len(below.parts)
            files = [each for each in files if each[2].parts[-length:] == below.parts]
        is_one = len(files) == 1 and files[0][0] not in taken  # a target is of one image
        faults += [f"{below}"] * (not is_one)
        found += [path for path, *_ in files]
        taken.update(found[-1:])
    if faults:
        raise InputError(
            f"targets={folder!r}: {len(faults):,} of the {source.num_examples:,} images of "
            f"{source.split} have no .png or .npy of the same name there, or several: "
            f"{few(faults)}; give the folder of their targets"
        )
    return found


def check_shared(
    files: Mapping[str, Sequence[pathlib.Path]], sources: Mapping[str, Source]
) -> None:
    """Raise InputError if two images of different splits have one target of `files`."""
    images: dict[pathlib.Path, str] = {}
    for split_key, source in sources.items():
        if source.name not in DIVIDED:  # whose names tell where an image is
            continue
        for record, path in enumerate(files[split_key]):
            name = source.record_name(record)
            if (other := images.setdefault(path, name)) != name:
                raise InputError(
                    f"targets: {path} is the target of {other} and of {name}; put the targets of "
                    "each split into a folder of its name, such as val/"
                )


def _below_split(path: pathlib.PurePath) -> tuple[str | None, pathlib.PurePath]:
    """(the split that a folder of `path` names, if one does; the path below, without ending)."""
    path = path.with_suffix("")
    for i, part in enumerate(path.parts[:-1]):
        if split := split_of(re.sub(r"(?<=\D)\d{4}$", "", part)):
            return split, pathlib.PurePath(*path.parts[i + 1 :])
    return None, path


def interpolate(y_RSC: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Outputs of patches at the pixels of a target: linear between centres, constant beyond them.

    Shapes: (R, S, C), (H, W) -> (H, W, C).
    """
    rows_HR, columns_WS = (
        _weights(n, size) for n, size in zip(y_RSC.shape[:2], shape, strict=True)
    )
    y_HSC = np.tensordot(rows_HR, y_RSC, axes=1)
    return np.matmul(columns_WS[None], y_HSC)


def _weights(number: int, size: int) -> np.ndarray:
    """float32 (size, number): the weights of `number` values in `size` interpolated ones."""
    at = np.clip((np.arange(size) + 0.5) * number / size - 0.5, 0, number - 1)
    return np.maximum(1 - np.abs(at[:, None] - np.arange(number)), 0).astype(np.float32)


def _check(inputs: EvalInputs) -> None:
    """Raise InputError if the model has no patches, or the ops change where things are."""
    family, faults = type(inputs.model).__name__, Faults()
    faults.need(
        hasattr(inputs.model, "tokens"),
        f"type: a {family} has no features of patches; leave the evaluator out",
    )
    cutting = "|".join(op.text for op in inputs.host_ops if op.cuts)
    faults.need(
        not cutting,
        f"ops: {cutting} keeps a part of an image, but its target is of all of it; set "
        "ops='decode|resize'",
    )
    collect_faults(faults)
