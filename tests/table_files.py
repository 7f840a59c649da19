"""Parquet files, and Arrow files as `datasets.save_to_disk` writes them, for tests."""

import json

import pyarrow as pa
import pyarrow.parquet as pq


def make_table(images, labels, names=None, paths=None):
    """As `datasets` has it: pairs of bytes and paths, and `names` of the classes if given."""
    paths = [None] * len(images) if paths is None else paths
    pairs = pa.StructArray.from_arrays(
        [pa.array(images, pa.binary()), pa.array(paths, pa.string())], ["bytes", "path"]
    )
    features = {"image": {"_type": "Image"}}
    if names is not None:
        features["label"] = {"names": list(names), "_type": "ClassLabel"}
    noted = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.table({"image": pairs, "label": labels}).replace_schema_metadata(noted)


def write_parquet(table, path, rows=4, **options):
    """With row groups of that many records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows, **options)
    return path


def save_to_disk(splits, folder, num_shards=2):
    """{split: table}, as a `DatasetDict`."""
    folder.mkdir()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [*splits]}))
    for split, table in splits.items():
        (folder / split).mkdir()
        size = -(-len(table) // num_shards)
        names = [f"data-{i:05d}-of-{num_shards:05d}.arrow" for i in range(num_shards)]
        for i, name in enumerate(names):
            part = table.slice(i * size, size)
            with pa.ipc.new_stream(folder / split / name, part.schema) as stream:
                stream.write_table(part, max_chunksize=size // 2)
        state = {"_data_files": [{"filename": name} for name in names]}
        (folder / split / "state.json").write_text(json.dumps(state))
        (folder / split / "cache-1.arrow").write_bytes(b"of ds.map")
