"""Stand-ins for the 16 TFDS data sets of VTAB-1k, with their features, as TFDS prepares them.

Only the files that a task reads are written. dataset_info.json also has the lengths of the others,
so `train[589824:590024]` has the same meaning as in the real data set.
"""

import functools
import itertools
import json

import numpy as np
from images import encode

from vit_jax.data.host_tf import tf, tfds
from vit_jax.data.sources.vtab import TASKS

TEST_EXAMPLES = 40

# Version and number of examples by split, from the TFDS catalogue.
SPLITS = {
    "caltech101": ("3.0.2", {"train": 3059, "test": 6084}),
    "cifar100": ("3.0.2", {"train": 50000, "test": 10000}),
    "dtd": ("3.0.1", {"train": 1880, "validation": 1880, "test": 1880}),
    "oxford_flowers102": ("2.1.1", {"train": 1020, "validation": 1020, "test": 6149}),
    "oxford_iiit_pet": ("4.0.0", {"train": 3680, "test": 3669}),
    "sun397/tfds": ("4.0.0", {"train": 76128, "validation": 10875, "test": 21750}),
    "svhn_cropped": ("3.1.0", {"train": 73257, "test": 26032, "extra": 531131}),
    "patch_camelyon": ("2.0.0", {"train": 262144, "validation": 32768, "test": 32768}),
    "eurosat/rgb": ("2.0.0", {"train": 27000}),
    "resisc45": ("3.0.0", {"train": 31500}),
    "diabetic_retinopathy_detection/btgraham-300": (
        "3.0.0",
        {"train": 35126, "validation": 10906, "test": 42670},
    ),
    "clevr": ("3.1.0", {"train": 70000, "validation": 15000, "test": 15000}),
    "dmlab": ("2.0.1", {"train": 65550, "validation": 22628, "test": 22735}),
    "dsprites": ("2.0.0", {"train": 737280}),
    "kitti": ("3.3.0", {"train": 6347, "validation": 423, "test": 711}),
    "smallnorb": ("2.0.0", {"train": 24300, "test": 24300}),
}

F = tfds.features
_CLEVR_OBJECTS = F.Sequence(
    {
        "color": F.ClassLabel(num_classes=8),
        "material": F.ClassLabel(num_classes=2),
        "shape": F.ClassLabel(num_classes=3),
        "size": F.ClassLabel(num_classes=2),
        "rotation": F.Tensor(shape=(), dtype=np.float32),
        "3d_coords": F.Tensor(shape=(3,), dtype=np.float32),
        "pixel_coords": F.Tensor(shape=(3,), dtype=np.float32),
    }
)
_KITTI_OBJECTS = F.Sequence(
    {
        "type": F.ClassLabel(num_classes=8),
        "truncated": F.Tensor(shape=(), dtype=np.float32),
        "occluded": F.ClassLabel(num_classes=4),
        "alpha": F.Tensor(shape=(), dtype=np.float32),
        "bbox": F.BBoxFeature(),
        "dimensions": F.Tensor(shape=(3,), dtype=np.float32),
        "location": F.Tensor(shape=(3,), dtype=np.float32),
        "rotation_y": F.Tensor(shape=(), dtype=np.float32),
    }
)


def _classes(count):
    return F.ClassLabel(names=[f"kind {i}" for i in range(count)])


# The features in the catalogue, without clevr's question_answer, which is not used.
FEATURES = {
    "caltech101": {"image": F.Image(), "label": _classes(102), "image/file_name": F.Text()},
    "cifar100": {
        "id": F.Text(), "image": F.Image(shape=(32, 32, 3)), "label": _classes(100),
        "coarse_label": _classes(20),
    },
    "dtd": {"file_name": F.Text(), "image": F.Image(), "label": _classes(47)},
    "oxford_flowers102": {"image": F.Image(), "label": _classes(102), "file_name": F.Text()},
    "oxford_iiit_pet": {
        "image": F.Image(), "label": _classes(37), "species": _classes(2), "file_name": F.Text(),
    },
    "sun397/tfds": {"file_name": F.Text(), "image": F.Image(), "label": _classes(397)},
    "svhn_cropped": {"id": F.Text(), "image": F.Image(shape=(32, 32, 3)), "label": _classes(10)},
    "patch_camelyon": {"id": F.Text(), "image": F.Image(shape=(96, 96, 3)), "label": _classes(2)},
    "eurosat/rgb": {
        "image": F.Image(shape=(64, 64, 3)), "label": _classes(10), "filename": F.Text(),
    },
    "resisc45": {
        "image": F.Image(shape=(256, 256, 3)), "label": _classes(45), "filename": F.Text(),
    },
    "diabetic_retinopathy_detection/btgraham-300": {
        "name": F.Text(), "image": F.Image(), "label": _classes(5),
    },
    "clevr": {"image": F.Image(), "file_name": F.Text(), "objects": _CLEVR_OBJECTS},
    "dmlab": {"image": F.Image(shape=(360, 480, 3)), "filename": F.Text(), "label": _classes(6)},
    "dsprites": {
        "image": F.Image(shape=(64, 64, 1)),
        "label_shape": F.ClassLabel(num_classes=3), "label_scale": F.ClassLabel(num_classes=6),
        "label_orientation": F.ClassLabel(num_classes=40),
        "label_x_position": F.ClassLabel(num_classes=32),
        "label_y_position": F.ClassLabel(num_classes=32),
        **{f"value_{of}": F.Tensor(shape=(), dtype=np.float32)
           for of in ("shape", "scale", "orientation", "x_position", "y_position")},
    },
    "kitti": {"image": F.Image(), "image/file_name": F.Text(), "objects": _KITTI_OBJECTS},
    "smallnorb": {
        "image": F.Image(shape=(96, 96, 1)), "image2": F.Image(shape=(96, 96, 1)),
        "instance": F.ClassLabel(num_classes=10), "label_category": _classes(5),
        "label_azimuth": F.ClassLabel(num_classes=18),
        "label_elevation": F.ClassLabel(num_classes=9),
        "label_lighting": F.ClassLabel(num_classes=6),
    },
}  # fmt: skip


def write_stand_ins(root, tfds_names=tuple(FEATURES), make_label=lambda i, count: i % count):
    """Write root/NAME/VERSION for each data set; every image shows its labels.

    `make_label`: (index, number of classes) -> label, for data sets with a feature `label`.
    """
    for name in tfds_names:
        _write(root, name, make_label)


def _write(root, name, make_label):
    version, _ = SPLITS[name]
    folder = root / name / version
    folder.mkdir(parents=True)
    dataset, _, config = name.partition("/")
    features = F.FeaturesDict(FEATURES[name])
    features.save_config(str(folder))
    serializer = tfds.core.example_serializer.ExampleSerializer(features.get_serialized_info())
    infos = []
    for split, (size, used) in _used(name).items():
        edges = sorted({0, size, *used, *used.values()})
        for shard, (start, stop) in enumerate(itertools.pairwise(edges)):
            if not any(first <= start and stop <= last for first, last in used.items()):
                continue
            file = f"{dataset}-{split}.tfrecord-{shard:05d}-of-{len(edges) - 1:05d}"
            with tf.io.TFRecordWriter(str(folder / file)) as writer:
                for i in range(start, stop):
                    example = features.encode_example(_make_example(name, i, make_label))
                    writer.write(serializer.serialize_example(example))
        lengths = [str(stop - start) for start, stop in itertools.pairwise(edges)]
        template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
        infos.append(
            {"name": split, "shardLengths": lengths, "numBytes": "1", "filepathTemplate": template}
        )
    info = {"name": dataset, "version": version, "fileFormat": "tfrecord", "splits": infos}
    if config:
        info["configName"] = config
    (folder / "dataset_info.json").write_text(json.dumps(info))


def split_infos(sizes):
    """TFDS's split infos for {split: number of examples}, to resolve its notation."""
    return {
        split: tfds.core.SplitInfo(name=split, shard_lengths=[size], num_bytes=0)
        for split, size in sizes.items()
    }


def _used(name):
    """{split: (number of examples, {start: stop} of the parts that tasks read)}; short tests."""
    sizes, tasks = dict(SPLITS[name][1]), [t for t in TASKS.values() if t.tfds_name == name]
    for task in tasks:
        split, _, begin = task.test.partition("[")
        percent = begin == "50%:]"
        begin = int(begin.strip(":]")) if begin and not percent else 0
        sizes[split] = 400 if percent else begin + TEST_EXAMPLES
    used = {split: {} for split in sizes}
    for task in tasks:
        for text in (task.splits["train800val200"], task.test):
            for part in tfds.core.ReadInstruction.from_spec(text).to_absolute(split_infos(sizes)):
                stop = sizes[part.splitname] if part.to is None else part.to
                used[part.splitname][part.from_ or 0] = stop
    return {split: (sizes[split], used[split]) for split in sizes}


def _make_example(name, i, make_label):
    example = {key: _filler(feature, i) for key, feature in FEATURES[name].items()}
    if name == "clevr":
        count, depth = i % 8, i // 8 % 6
        nearest = (4.0, 8.25, 8.75, 9.25, 9.75, 50.0)[depth]
        one = {key: _filler(feature, i) for key, feature in _CLEVR_OBJECTS.feature.items()}
        example["objects"] = [one | {"pixel_coords": [0, 0, nearest + k]} for k in range(count + 3)]
        example["image"] = _bars(32, 32, 4 * count, 4 * depth)
    elif name == "kitti":
        label = i % 4
        one = {key: _filler(feature, i) for key, feature in _KITTI_OBJECTS.feature.items()}
        person = one | {"type": 3, "location": [0, 0, 1.0]}
        vehicle = one | {"type": i % 3, "location": [0, 0, (5.0, 15.0, 50.0, 0)[label]]}
        example["objects"] = [person, vehicle] if label < 3 else [person]
        example["image"] = _colour(24, 32, label)
    elif name == "dsprites":
        x, orientation = i % 32, i % 40
        example |= {"label_x_position": x, "label_orientation": orientation}
        example["image"] = _bars(64, 64, 2 * x, orientation, value=1)
    elif name == "smallnorb":
        azimuth, elevation = i % 18, i // 18 % 9
        example |= {"label_azimuth": azimuth, "label_elevation": elevation}
        example["image"] = example["image2"] = _bars(96, 96, 5 * azimuth, 10 * elevation)
    else:
        label = make_label(i, FEATURES[name]["label"].num_classes)
        height, width, _ = FEATURES[name]["image"].shape
        example |= {"label": label, "image": _colour(height or 24, width or 32, label)}
    return example


def _filler(feature, i):
    if isinstance(feature, F.Text):
        return str(i)
    if isinstance(feature, F.BBoxFeature):
        return F.BBox(0.0, 0.0, 1.0, 1.0)
    if isinstance(feature, F.ClassLabel):
        return 0
    return np.zeros(feature.shape, np.float32) if type(feature) is F.Tensor else None


@functools.cache
def _colour(height, width, label):
    """A PNG of one colour, different for each label."""
    colour = np.random.default_rng(label).integers(0, 256, 3, np.uint8)
    return encode(np.tile(colour, (height, width, 1)), "PNG")


@functools.cache
def _bars(height, width, column, row, value=255):
    """A grey PNG with a vertical bar at a column and a horizontal bar at a row."""
    image = np.zeros((height, width), np.uint8)
    image[:, column : column + 4] = image[row : row + 4] = value
    return encode(image, "PNG")
