"""Sets that tests prepare, and the records that are read of them."""

import dataclasses
import pathlib

import numpy as np

from vit_jax.config.sections import Data
from vit_jax.curation.pictures import Rule, read_pictures
from vit_jax.curation.prepare import in_processes, prepare, reading_of
from vit_jax.curation.shards import Plan, open_splits
from vit_jax.data import host_batches, image_batch, parse_ops

KEPT = Rule()


def plan_of(output, file_format="tar", name="folder", data_dir=None, rule=KEPT, **changes):
    data = Data(name=name, data_dir=None if data_dir is None else str(data_dir))
    plan = Plan(data, ("train",), False, str(output), file_format, rule, 5)
    return dataclasses.replace(plan, **changes)


def make(plan, workers=1, command="vit_jax prepare"):
    return prepare(plan, command, in_processes(workers))


def prepared(plan):
    """The plan that reads what `plan` prepares."""
    return dataclasses.replace(
        plan, data=dataclasses.replace(plan.data, own={}, **reading_of(plan.folder, plan.format))
    )


def pictures(plan, split="train"):
    """{original name, or number: (bytes, label)} of the records of a source."""
    source = open_splits(dataclasses.replace(plan, splits=(split,)))[split]
    found = read_pictures(source, np.arange(source.num_examples), Rule())
    return [(picture.image, picture.label.tolist()) for picture in found]


def training_rows(plan, size, steps=2):
    """Images and labels of the first training batches."""
    source = open_splits(plan)["train"]
    ops = parse_ops("decode|resize|flip", size)[0]
    spec = image_batch(8, size, ops)
    batches = host_batches(source, spec, steps=range(steps), seed=0, rows=np.arange(8))
    return [(batch["image"].tobytes(), batch["label"].tolist()) for batch in batches]


def files_of(plan):
    """{path: bytes} of all finished files below the output, without the command and its place.

    An index of a tar file, which its first reader makes, is none of them.
    """
    root = pathlib.Path(plan.output)
    return {
        str(path.relative_to(root)): path.read_bytes().replace(plan.output.encode(), b"")
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix not in (".tmp", ".index")
    }
