"""Makes the numbers of docs/explanation/data_reading.md: what each source costs.

python tools/data_costs.py imagenet_sample DIR WORK [ROUNDS]
python tools/data_costs.py cifar10 DIR WORK [ROUNDS]
python tools/data_costs.py start WORK

The first two compare the CPU time of an image with TFRecord. DIR holds the prepared TFDS data
set. The first call writes its training images below WORK as tar, Parquet, Arrow and arrays. Every
round reads 512 images from each source in turn, in one process, so that a busy machine slows all of
them alike. `start` opens 10,000 tar shards of 1,280 images, which are empty but have their indexes.
"""

import functools
import io
import json
import os
import pathlib
import resource
import sys
import tarfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from vit_jax.data import host_batches, image_batch, make_order, make_source, parse_ops
from vit_jax.data.host_tf import tf
from vit_jax.data.images.formats import to_pixels
from vit_jax.data.sources import arrays, tar
from vit_jax.diagnosis.benchmarks.input import round_calls
from vit_jax.diagnosis.benchmarks.rounds import measure, spread, spread_of_ratio

# Data set -> size of the images, ops, images of a batch, largest row group and images of a shard.
CASES = {
    "imagenet_sample": (224, "decode|inception_crop|flip", 64, 100, 250),
    "cifar10": (32, "decode|resize|pad_crop(4)|flip", 128, 1000, 10_000),
}


def open_source(name, size, **how):
    return make_source(name, split="train", image_size=(size, size), **how)


def write(source, root, group, shard):
    """The images of `source` in every format."""
    ids = tf.data.Dataset.range(source.num_examples)
    examples = [*ids.map(source.read, tf.data.AUTOTUNE).as_numpy_iterator()]
    images = [example["image"] for example in examples]
    labels = [int(example["label"]) for example in examples]
    noted = {"image": {"_type": "Image"}}
    noted["label"] = {"names": source.class_names, "_type": "ClassLabel"}
    metadata = {"huggingface": json.dumps({"info": {"features": noted}})}
    pairs = pa.StructArray.from_arrays(
        [pa.array(images, pa.binary()), pa.nulls(len(images), pa.string())], ["bytes", "path"]
    )
    table = pa.table({"image": pairs, "label": labels}).replace_schema_metadata(metadata)
    for name in ("tar", "parquet", "arrow/train"):
        (root / name).mkdir(parents=True)
    (root / "tar/classes.txt").write_text("\n".join(source.class_names))
    for i in range(0, len(images), shard):
        part = table.slice(i, shard)
        pq.write_table(part, root / f"parquet/train-{i:05d}.parquet", row_group_size=group)
        with pa.ipc.new_stream(root / f"arrow/train/data-{i:05d}.arrow", part.schema) as stream:
            stream.write_table(part, max_chunksize=group)
        with tarfile.open(root / f"tar/train-{i:05d}.tar", "w") as tar:
            for j in range(i, min(i + shard, len(images))):
                for name, content in ((f"{j}.jpg", images[j]), (f"{j}.cls", b"%d" % labels[j])):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    if source.name == "cifar10":
        decoded = tf.data.Dataset.from_tensor_slices(images).map(to_pixels, tf.data.AUTOTUNE)
        pixels = np.stack([*decoded.as_numpy_iterator()])
        names = np.array(source.class_names)
        np.savez(root / "arrays.npz", train_images=pixels, train_labels=labels, class_names=names)


def open_all(name, data_dir, root):
    """{format: source} and what to call before each is read."""
    size, _, _, group, shard = CASES[name]
    records = open_source(name, size, data_dir=data_dir, reader="offsets")
    if not root.exists():
        write(records, root, group, shard)
    found = {"tfrecord": records}
    found |= {
        form: open_source(form, size, data_dir=str(root / form))
        for form in ("tar", "parquet", "arrow")
    }
    if name == "cifar10":
        found["arrays"] = open_source("arrays", size, data_dir=str(root / "arrays.npz"))
        found["memory"] = open_source(name, size, data_dir=data_dir, reader="memory")
    else:
        lines = [line for path in sorted((root / "tar").glob("*.tar")) for line in _files(path)]
        with arrays.give({"train": lines, "class_names": records.class_names}):
            found["pairs of bytes"] = open_source("arrays", size)
    return found


def _files(path):
    """The pairs (image, label) of a tar file, in Python."""
    with tarfile.open(path) as tar:
        content = {member.name: tar.extractfile(member).read() for member in tar}
    keys = (name.removesuffix(".jpg") for name in content if name.endswith(".jpg"))
    return [(content[f"{key}.jpg"], int(content[f"{key}.cls"])) for key in keys]


def main(name, data_dir, work, num_rounds="7"):
    size, ops, batch, group, _ = CASES[name]
    sources = open_all(name, os.path.expanduser(data_dir), pathlib.Path(work) / name)
    spec = image_batch(batch, (size, size), parse_ops(ops, (size, size))[0])
    orders = {form: "record" for form in sources} | {"tfrecord in chunks": "chunk"}
    sources |= {"tfrecord in chunks": sources["tfrecord"], "parquet in chunks": sources["parquet"]}
    orders["parquet in chunks"] = "chunk"
    rounds, makers = 1 + int(num_rounds), {}
    for form, source in sources.items():
        streams = 8 if orders[form] == "chunk" else None
        how = {"global_batch_size": batch, "chunk_size": group, "streams": streams}
        order = make_order(orders[form], source.part_sizes, 0, **how)
        where = {"seed": 0, "rows": np.arange(batch), "data_order": order}
        makers[form] = functools.partial(host_batches, source, spec, **where)
    calls = round_calls(makers, 512 // batch, rounds)
    measure(calls, 1)  # warm-up
    costs = measure(calls, rounds - 1)
    cpu = {form: [1e3 * cost.cpu_s / 512 for cost in found] for form, found in costs.items()}
    for form, values in cpu.items():
        ratio = spread_of_ratio(values, cpu["tfrecord"])
        shown = ", ".join(f"{key} {value:.3f}" for key, value in ratio.items())
        print(f"{form:20} {spread(values)['median']:.3f} CPU ms an image; to TFRecord: {shown}")


def start(work, num_shards=10_000, num_images=1280):
    """Open tar shards that have indexes, and print the cost."""
    root = pathlib.Path(work) / "start"
    if not root.exists():
        (root / ".vit_jax").mkdir(parents=True)
        labels = tar.Labels.of([str(i % 1000)] for i in range(num_images))
        places = np.zeros(num_images, tar._PLACE)
        places["begin"], places["size"] = 512 + 110_592 * np.arange(num_images), 109_000
        for i in range(num_shards):
            path = root / f"train-{i:05d}.tar"
            path.touch()
            head = {
                "identity": tar._identity(epath.Path(path)),
                "sizes": [num_images] * 3,
                "digest": str(i),
                "names": labels.names,
                "notes": [],
            }
            keys = [f"n{j % 1000:08d}_{i * num_images + j}.jpg" for j in range(num_images)]
            tail = {"keys": keys, "captions": [[0, 0]] * num_images}
            index = [json.dumps(head).encode() + b"\n", places, labels.codes, labels.counts]
            content = b"".join([*map(bytes, index), json.dumps(tail).encode()])
            (root / f".vit_jax/{path.name}.index").write_bytes(content)
    tf.constant(0)
    cpu, before = time.process_time(), _peak()
    source = open_source("tar", 224, data_dir=str(root))
    cpu = time.process_time() - cpu
    print(f"{source.num_examples:,} images: {cpu:.1f} CPU s, {_peak() - before:.2f} GiB")


def _peak():
    """GiB of memory that this process has held at most, on Linux."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    start(*sys.argv[2:]) if sys.argv[1] == "start" else main(*sys.argv[1:])
