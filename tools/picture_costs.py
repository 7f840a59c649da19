"""CPU time and bytes of a picture in each step of preparing: docs/explanation/picture_costs.csv.

python tools/picture_costs.py WORKDIR --data_dir=DIR [--rounds=3]

DIR holds imagenet_sample/VERSION, 500 photographs of ImageNet's size. Each round measures all
steps, with many pictures and with few; the difference leaves out what a start costs. Rows have the
median of the rounds. Steps that the CSV has are not measured again.
"""

import argparse
import functools
import os
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from measured_runs import ROOT, add_row, has_row
from sklearn.cluster import MiniBatchKMeans

from vit_jax.config.sections import Data
from vit_jax.curation.looks import look_at
from vit_jax.curation.pictures import Rule
from vit_jax.curation.prepare import in_processes, prepare
from vit_jax.curation.shards import FOLDER, Plan, Shard, make_shard, open_splits
from vit_jax.data import host_batches, image_batch, make_source, parse_ops
from vit_jax.models import create_model

TABLE = ROOT / "docs/explanation/picture_costs.csv"
MANY, FEW = 288, 32
CROP = "decode|inception_crop|flip"
WIDTH, CLUSTERS = 384, 1000  # of ViT-S/16; clusters of the first level


def plan_of(output: pathlib.Path, data_dir: str, side: int | None, shard_size: int) -> Plan:
    data, rule = Data(name="imagenet_sample", data_dir=data_dir), Rule(side)
    return Plan(data, ("train",), False, os.fspath(output), "array_record", rule, shard_size)


def make_one(work: pathlib.Path, data_dir: str, side: int | None, number: int) -> float:
    """Make a shard of so many photographs; returns its bytes a picture."""
    plan = plan_of(work / f"{side}_{number}_{time.monotonic_ns()}/birds", data_dir, side, number)
    (plan.folder / FOLDER).mkdir(parents=True)
    source = open_splits(plan)["train"]
    record = make_shard(plan, Shard("train", 0, 2, source.fingerprint))
    return record["bytes"] / record["records"]


def train(data_dir: str, name: str, number: int) -> float:
    """Read so many pictures as a training run at 224 pixels does; returns 0 bytes."""
    source = make_source(name, split="train", image_size=(224, 224), data_dir=data_dir)
    spec = image_batch(32, (224, 224), parse_ops(CROP, (224, 224))[0])
    for _ in host_batches(source, spec, steps=range(number // 32), seed=0, rows=np.arange(32)):
        pass
    return 0.0


def hashes(data_dir: str, number: int) -> float:
    """Hash so many photographs for the search of near duplicates."""
    source = make_source("imagenet_sample", split="train", image_size=(224, 224), data_dir=data_dir)
    return float(look_at(source, 0, number).hashes[0].nbytes)


@functools.cache
def features_of():
    model = create_model("ViT-S/16", num_classes=None)
    params = model.init(jax.random.key(0), jnp.zeros((1, 224, 224, 3)))
    images = jnp.zeros((4, 224, 224, 3))
    call = jax.jit(functools.partial(model.apply, params))
    call(images).block_until_ready()
    return lambda: call(images).block_until_ready()


def features(number: int) -> float:
    """Compute the features of an eighth of so many pictures."""
    for _ in range(number // 32):
        features_of()()
    return 2.0 * WIDTH


@functools.cache
def clusters() -> MiniBatchKMeans:
    x_ND = np.random.default_rng(0).normal(size=(10 * CLUSTERS, WIDTH)).astype(np.float32)
    return MiniBatchKMeans(CLUSTERS, init=x_ND[:CLUSTERS], n_init=1, max_iter=1).fit(x_ND)


def assign(number: int) -> float:
    """Find the clusters of 100 times as many features."""
    clusters().predict(np.random.default_rng(1).normal(size=(100 * number, WIDTH)).astype("f4"))
    return 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("--data_dir", required=True, help="holds imagenet_sample/VERSION")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    work, data_dir = args.workdir.resolve(), os.path.abspath(args.data_dir)
    small = work / "small/birds"
    prepare(plan_of(small, data_dir, 256, MANY), "tools/picture_costs.py", in_processes(1))
    steps = {
        "prepare, kept": (functools.partial(make_one, work, data_dir, None), 1),
        "prepare, --side=256": (functools.partial(make_one, work, data_dir, 256), 1),
        "hash for duplicates": (functools.partial(hashes, data_dir), 1),
        "read to train, originals": (functools.partial(train, data_dir, "imagenet_sample"), 1),
        "read to train, prepared": (functools.partial(train, small.parent, "birds"), 1),
        "features, ViT-S/16 at 224 px": (features, 1 / 8),
        "cluster of 1,000": (assign, 100),
    }
    steps = {name: step for name, step in steps.items() if not has_row(TABLE, {"step": name})}
    cpu_s, size = {name: [] for name in steps}, {}
    for _ in range(args.rounds + 1):  # the first one warms up
        for name, (step, times) in steps.items():
            used = []
            for number in (FEW, MANY):
                start = time.process_time()
                size[name] = step(number)
                used.append(time.process_time() - start)
            cpu_s[name].append((used[1] - used[0]) / ((MANY - FEW) * times))
    for name, found in cpu_s.items():
        found = [1e3 * value for value in found[1:]]
        add_row(TABLE, {"step": name, "cpu_ms": f"{statistics.median(found):.4f}",
                        "least": f"{min(found):.4f}", "most": f"{max(found):.4f}",
                        "bytes": round(size[name])})  # fmt: skip


if __name__ == "__main__":
    main()
