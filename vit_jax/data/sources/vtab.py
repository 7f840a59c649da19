"""VTAB-1k: 19 tasks of 1,000 training images each, as sources `vtab/TASK` over prepared TFDS sets.

Splits: `train800` for training and `val200` for choices, `train800val200` for the final training,
and `test`. Source: Zhai et al. 2019 (arXiv:1910.04867), section 2 and appendix A.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np

from vit_jax.base.errors import InputError, few, nearest
from vit_jax.data.contract import DataSet, Request, Source, fingerprint, read_labels
from vit_jax.data.host_tf import tf
from vit_jax.data.sources.tfds import View, open_prepared, prepared_folder

logger = logging.getLogger("vit_jax")

Example = dict[str, Any]

_LABEL = View()  # the data set's own label


def count_label(example: Example) -> tf.Tensor:
    """CLEVR: the number of objects (3 to 10) minus 3."""
    return tf.shape(example["objects"]["pixel_coords"])[0] - 3


def depth_label(example: Example) -> tf.Tensor:
    """CLEVR: the bin of the nearest object's distance from the camera."""
    nearest_object = tf.reduce_min(example["objects"]["pixel_coords"][:, 2])
    return bin_label(nearest_object, (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0))


def vehicle_label(example: Example) -> tf.Tensor:
    """KITTI: the bin of the distance in metres to the nearest car, van or truck; none is far."""
    is_vehicle = example["objects"]["type"] < 3
    distances = tf.boolean_mask(example["objects"]["location"][:, 2], is_vehicle)
    nearest_vehicle = tf.reduce_min(tf.concat([distances, [1000.0]], 0))
    return bin_label(nearest_vehicle, (-100.0, 8.0, 20.0, 999.0))


def bin_label(value: tf.Tensor, edges: tuple[float, ...]) -> tf.Tensor:
    """The largest i with edges[i] < `value`."""
    return tf.searchsorted(tf.constant(edges), value[None], side="left")[0] - 1


def position_label(example: Example) -> tf.Tensor:
    """dSprites: the 32 positions, two to a class."""
    return example["label_x_position"] // 2


def orientation_label(example: Example) -> tf.Tensor:
    """dSprites: floor(label / 2.5), 40 orientations in 16 classes, alternately three and two."""
    return example["label_orientation"] * 2 // 5


@dataclasses.dataclass(frozen=True)
class Task:
    """One of the 19 tasks.

    Attributes:
      group: natural, specialised or structured.
      tfds_name: name of the data set, without version.
      val200, test: splits in TFDS notation.
      test_size: number of examples of `test`.
      num_classes: number of classes of the task.
      view: the way its images and labels are made from the data set's examples.
    """

    group: str
    tfds_name: str
    val200: str
    test: str
    test_size: int
    num_classes: int
    view: View = _LABEL

    @property
    def splits(self) -> dict[str, str]:
        """{name: TFDS notation} of the task's splits."""
        both = f"train[:800]+{self.val200}"
        return {"train800": "train[:800]", "val200": self.val200, "train800val200": both,
                "test": self.test}  # fmt: skip

    @property
    def sizes(self) -> dict[str, int]:
        """{name: number of examples} of the task's splits."""
        return {"train800": 800, "val200": 200, "train800val200": 1000, "test": self.test_size}


GROUPS = ("natural", "specialised", "structured")
_natural, _specialised, _structured = (functools.partial(Task, group) for group in GROUPS)


def _plain(feature: str) -> View:
    return View((feature,), lambda example: example[feature])


_COUNT, _DEPTH = View(("objects",), count_label, 8), View(("objects",), depth_label, 6)
_VEHICLE = View(("objects",), vehicle_label, 4)
_POSITION = View(("label_x_position",), position_label, 16, image_scale=255)
_ORIENTATION = View(("label_orientation",), orientation_label, 16, image_scale=255)

# fmt: off
TASKS: dict[str, Task] = {
    "caltech101": _natural("caltech101", "train[2754:2954]", "test", 6084, 102),
    "cifar100": _natural("cifar100", "train[45000:45200]", "test", 10000, 100),
    "dtd": _natural("dtd", "validation[:200]", "test", 1880, 47),
    "flowers102": _natural("oxford_flowers102", "validation[:200]", "test", 6149, 102),
    "pets": _natural("oxford_iiit_pet", "train[2944:3144]", "test", 3669, 37),
    "sun397": _natural("sun397/tfds", "validation[:200]", "test", 21750, 397),
    "svhn": _natural("svhn_cropped", "train[65931:66131]", "test", 26032, 10),
    "patch_camelyon": _specialised("patch_camelyon", "validation[:200]", "test", 32768, 2),
    "eurosat": _specialised("eurosat/rgb", "train[16200:16400]", "train[21600:]", 5400, 10),
    "resisc45": _specialised("resisc45", "train[18900:19100]", "train[25200:]", 6300, 45),
    "retinopathy": _specialised("diabetic_retinopathy_detection/btgraham-300",
                                "validation[:200]", "test", 42670, 5),
    "clevr_count": _structured("clevr", "train[63000:63200]", "validation", 15000, 8, _COUNT),
    "clevr_distance": _structured("clevr", "train[63000:63200]", "validation", 15000, 6, _DEPTH),
    "dmlab": _structured("dmlab", "validation[:200]", "test", 22735, 6),
    "dsprites_location": _structured("dsprites", "train[589824:590024]", "train[663552:]", 73728,
                                     16, _POSITION),
    "dsprites_orientation": _structured("dsprites", "train[589824:590024]", "train[663552:]",
                                        73728, 16, _ORIENTATION),
    "kitti_distance": _structured("kitti", "validation[:200]", "test", 711, 4, _VEHICLE),
    "smallnorb_azimuth": _structured("smallnorb", "test[:200]", "test[50%:]", 12150, 18,
                                     _plain("label_azimuth")),
    "smallnorb_elevation": _structured("smallnorb", "test[:200]", "test[50%:]", 12150, 9,
                                       _plain("label_elevation")),
}
# fmt: on


class Vtab(DataSet):
    """A split of the task `vtab/TASK`, from its TFDS data set below `data_dir`.

    Warns of classes without any training image, and of a test split whose size differs from VTAB's,
    because its results are not comparable.
    """

    def open(self, request: Request) -> Source:
        """Raises InputError if the task or split is unknown, if the TFDS data set is missing (the
        message says how to get it), or if its classes or training images differ from VTAB's.
        """
        name, split = request.name, request.split
        task_name = name.removeprefix("vtab/")
        if task_name not in TASKS:
            raise InputError(f"data.name={name!r}: no such task; {nearest(task_name, list(TASKS))}")
        task = TASKS[task_name]
        if split not in task.splits:
            raise InputError(f"data.split={split!r} of {name}: {nearest(split, list(task.splits))}")
        of_tfds = dataclasses.replace(request, name=task.tfds_name, split=task.splits[split])
        try:
            source = open_prepared(of_tfds, task.view)
        except InputError as e:
            raise InputError(*(f"data.name={name!r}: {fault}" for fault in e.faults)) from None
        needed = {"classes": task.num_classes, "examples": task.sizes[split]}
        found = {"classes": source.num_classes, "examples": source.num_examples}
        if found != needed:
            said = f"{name} {split} ({task.tfds_name}) has {found}, but VTAB's has {needed}"
            if split != "test" or found["classes"] != needed["classes"]:
                raise InputError(f"data.name={name!r}: {said}; use the version of TFDS's catalogue")
            logger.warning("%s; the results are not comparable with VTAB's", said)
        if split in ("train800", "train800val200"):
            _warn_of_absent(source, name, split)
        identity = fingerprint(name, split, source.fingerprint)
        return dataclasses.replace(source, name=name, split=split, fingerprint=identity)


def _warn_of_absent(source: Source, name: str, split: str) -> None:
    labels = read_labels(source, 0, source.num_examples)
    absent = np.setdiff1d(np.arange(source.num_classes), labels)
    if len(absent):
        names = source.class_names or [f"class {i}" for i in range(source.num_classes)]
        logger.warning(
            "%s %s: %d of %d classes have no training image and cannot be learnt: %s",
            name, split, len(absent), source.num_classes, few(names[i] for i in absent),
        )  # fmt: skip


def find_missing(tasks: Iterable[str], data_dir: str | None) -> dict[str, str]:
    """{task: what is missing and how to get it} for the `tasks` whose data are missing."""
    missing = {}
    for task in tasks:
        try:
            prepared_folder(TASKS[task].tfds_name, data_dir)
        except InputError as e:
            missing[task] = str(e)
    return missing
