"""Memory and CPU time of each stage for millions of made-up records.

python tools/many_records.py WORKDIR [--records=10000000]  # docs/explanation/many_records.csv

A shard of small images is written once and copied. Each stage then runs in a process of its own.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np
from etils import epath
from measured_runs import ROOT, add_row, has_row

TABLE = ROOT / "docs/explanation/many_records.csv"
SHARD = 100_000
DIMS = 32  # of a feature
BATCH = 4096


def make_data(work: pathlib.Path, kind: str, number: int) -> None:
    """Write a TFDS set of that format below `work`."""
    import tensorflow as tf

    from vit_jax.curation.formats import FORMATS, Facts, Row

    made, facts = FORMATS[kind](), Facts(("a", "b"), False, False, False)
    output, shards = epath.Path(work / kind / "made_up"), number // SHARD
    image = tf.io.encode_png(np.zeros((1, 1, 3), np.uint8)).numpy()
    first = made.path(output, "train", 0, shards)
    first.parent.mkdir(parents=True)
    made.write(os.fspath(first), (Row(i, image, [i % 2], (), "") for i in range(SHARD)), facts)
    for shard in range(1, shards):
        shutil.copy(first, made.path(output, "train", shard, shards))
    made.describe(output, facts, {"train": ([SHARD] * shards, len(image) * number)})


def open_data(work: pathlib.Path, kind: str, number: int, **more):
    from vit_jax.data import make_source

    how = {"tfrecord": "offsets", "array_record": "array_record"}[kind]
    return make_source(
        "made_up", split="train", image_size=(8, 8), data_dir=work / kind, reader=how, **more
    )


def imports(work: pathlib.Path, number: int) -> None:
    import tensorflow  # noqa: F401

    import vit_jax.data
    import vit_jax.inference.parts  # noqa: F401


def open_tfrecord(work: pathlib.Path, number: int) -> None:
    open_data(work, "tfrecord", number)


def open_array_record(work: pathlib.Path, number: int) -> None:
    open_data(work, "array_record", number)


def read_from(work: pathlib.Path, number: int, order: str, **lists) -> None:
    """A batch from each of three places of a long run; `lists`: as `make_source` takes them."""
    from vit_jax.data import host_batches, image_batch, make_order, parse_ops

    source = open_data(work, "array_record", number, **lists)
    streams = 256 if order == "chunk" else None
    how = {"global_batch_size": BATCH, "chunk_size": 64, "streams": streams}
    data_order = make_order(order, source.part_sizes, 0, **how)
    spec = image_batch(BATCH, (8, 8), parse_ops("decode|resize", (8, 8))[0])
    for step in range(3):
        steps = range(10**6 * step, 10**6 * step + 1)
        where = {"seed": 0, "rows": np.arange(16), "data_order": data_order}
        assert len([*host_batches(source, spec, steps=steps, **where)]) == 1


def record_order(work: pathlib.Path, number: int) -> None:
    read_from(work, number, "record")


def chunk_order(work: pathlib.Path, number: int) -> None:
    read_from(work, number, "chunk")


def subset(work: pathlib.Path, number: int) -> None:
    """Nine tenths of the records, as `curate` may choose them."""
    read_from(work, number, "chunk", subset=(os.fspath(work / "part.npz"), False, 0))


def exclude(work: pathlib.Path, number: int) -> None:
    """All but a tenth of the records, as `duplicates` may list them."""
    read_from(work, number, "chunk", exclude=os.fspath(work / "rest.npz"))


def write_lists(work: pathlib.Path, number: int) -> None:
    from vit_jax.data.id_files import ids_to_bytes

    whole = open_data(work, "array_record", number)
    is_tenth = np.arange(number) % 10 == 0
    for name, chosen in (("part", ~is_tenth), ("rest", is_tenth)):
        content = ids_to_bytes(np.flatnonzero(chosen), whole.fingerprint)
        (work / f"{name}.npz").write_bytes(content)


def make_features(work: pathlib.Path, number: int) -> None:
    folder, rng, size = work / "features", np.random.default_rng(0), SHARD
    folder.mkdir()
    centres = rng.normal(size=(1000, DIMS)).astype(np.float16)
    for part in range(number // size):
        noise = rng.normal(size=(size, DIMS)).astype(np.float16) / 4
        np.save(folder / f"part_{part:05}.npy", centres[rng.integers(0, 1000, size)] + noise)
    facts = {"what": "features", "fingerprint": "made up", "weights": "none"}
    (folder / "predictions.json").write_text(json.dumps(facts | {"records_of_part": size}))
    (folder / "summary.json").write_text(json.dumps({"rows": number}))


def curate(work: pathlib.Path, number: int) -> None:
    from vit_jax.main import main

    words = [str(work / "features"), "--clusters=1000,100,10", f"--keep={number // 10}"]
    assert main(["curate", *words, f"--output={work / 'balanced.npz'}"]) == 0


STAGES = {
    "imports": imports,
    "TFRecord, first start": open_tfrecord,
    "TFRecord, restart": open_tfrecord,
    "array_record, start": open_array_record,
    "array_record, three batches, record": record_order,
    "array_record, three batches, chunk": chunk_order,
    "array_record, three batches, chunk, subset": subset,
    "array_record, three batches, chunk, exclude": exclude,
    "curate": curate,
}


def measure(stage: str, work: pathlib.Path, number: int) -> dict:
    """Run a stage in a process of its own."""
    words = [__file__, os.fspath(work), f"--records={number}", f"--stage={stage}"]
    said = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, check=True).stdout
    return json.loads(said.splitlines()[-1])


def used() -> dict:
    """CPU seconds and peak memory of this process; its parent's do not count, unlike in rusage."""
    status = pathlib.Path("/proc/self/status").read_text()
    kib = int(status.partition("VmHWM:")[2].split()[0])
    return {"cpu_s": round(time.process_time(), 1), "peak_gib": round(kib / 2**20, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--stage", choices=STAGES, help="run this one here")
    args = parser.parse_args()
    work = args.workdir.resolve()
    if args.stage:
        STAGES[args.stage](work, args.records)
        return print(json.dumps(used()))
    os.environ["XDG_CACHE_HOME"] = os.fspath(work / "cache")
    shutil.rmtree(work / "cache", ignore_errors=True)
    for kind in ("tfrecord", "array_record"):
        if not (work / kind).exists():
            make_data(work, kind, args.records)
    if not (work / "rest.npz").exists():
        write_lists(work, args.records)
    if not (work / "features").exists():
        make_features(work, args.records)
    for stage in STAGES:
        place = {"stage": stage, "records": str(args.records)}
        if not has_row(TABLE, place):
            add_row(TABLE, place | measure(stage, work, args.records))


if __name__ == "__main__":
    main()
