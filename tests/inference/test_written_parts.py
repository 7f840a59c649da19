"""Predictions of many images in parts: resumed after kills, divided over processes."""

import functools
import json
import signal
import time
import types

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from started_job import Job

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.data import keep_subset, make_source
from vit_jax.data.images.given import image_files
from vit_jax.inference import parts, saved
from vit_jax.inference.outputs import outputs
from vit_jax.inference.predict import classify
from vit_jax.job import processes
from vit_jax.main import main
from vit_jax.transfer import read_pretrained

pytestmark = pytest.mark.usefixtures("one_device")


class Killed(BaseException):
    pass


@pytest.fixture
def write(golden, monkeypatch):
    """write(folder, what, source): predictions of `hf_vit`, in parts of 32 records."""
    monkeypatch.setattr(parts, "_LEAST", 20)
    pretrained = read_pretrained(golden / "hf_vit")

    def write(folder, what="classes", source=None, pretrained=pretrained, **choice):
        choice = choice or ({"top": 2, "thresholds": 0.1} if what == "classes" else {})
        how = {"what": what, "batch_size": 16, **choice}
        return saved.write_predictions(pretrained, source or digits(), folder, "--output", **how)

    write.pretrained = pretrained
    return write


@functools.cache
def digits():
    return keep_subset(make_source("digits", split="test", image_size=(8, 8)), "72")


def tables(folder):
    return [pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]


def test_rows_are_the_same_after_kills(write, tmp_path, monkeypatch):
    """Before each of the first five writes: of the manifest, the arrays, and the tables."""
    folder, source, written = tmp_path / "features", digits(), []
    real = files.open_for_append

    def kill(moment, path, content=None):
        if path.parent == folder and len(written) == moment:
            raise Killed
        written.append(path.name)
        return real(path, content)

    for moment in range(5):
        monkeypatch.setattr(files, "open_for_append", functools.partial(kill, moment))
        with pytest.raises(Killed):
            write(folder, "features")
        assert not (folder / "summary.json").exists()
    monkeypatch.setattr(files, "open_for_append", functools.partial(kill, None))
    assert write(folder, "features")["rows"] == source.num_examples == 72
    assert written.count("predictions.json") == 1 and written.count("part_00000.parquet") == 1
    rows = [row for table in tables(folder) for row in table.to_pylist()]
    assert [row["id"] for row in rows] == list(range(72))
    assert [row["file"] for row in rows] == [source.record_name(i) for i in range(72)]
    found = np.concatenate([np.load(path) for path in sorted(folder.glob("*.npy"))])
    assert found.dtype == np.float16
    expected, batches = zip(
        *outputs(write.pretrained, source, what="features", batch_size=16), strict=True
    )
    np.testing.assert_array_equal(found, np.concatenate(expected).astype(np.float16))
    labels = np.concatenate([batch["label"] for batch in batches])
    assert [row["label"] for row in rows] == labels.tolist()
    assert write(folder, "features")["rows"] == 72  # computes nothing again
    assert written.count("part_00002.npy") == 1


def test_classes_are_those_of_classify(write, tmp_path):
    folder = tmp_path / "classes"
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    source = image_files([str(tmp_path / name) for name in ("a.png", "b.png")])
    summary = write(folder, source=source)
    assert summary == {"output": str(folder), "rows": 2, "unreadable": 1}
    assert json.loads((folder / "summary.json").read_text()) == summary
    (table,) = tables(folder)
    assert table.column_names == ["id", "file", "classes", "error"]  # nobody has labelled files
    expected = classify(write.pretrained, source, batch_size=16, top=2, thresholds=0.1)
    for found, row in zip(table.to_pylist(), expected, strict=True):
        assert (found["file"], found["error"]) == (row["file"], row.get("error"))
        assert [c["index"] for c in found["classes"] or []] == [
            c["index"] for c in row.get("classes", [])
        ]


def test_a_folder_belongs_to_one_model_and_one_data_set(write, tmp_path):
    write(tmp_path)
    params = {**write.pretrained.params}
    params["head/bias"] = params["head/bias"] + 1
    model = write.pretrained.model
    same = model.clone(head_bias=0, dtype="float32")  # for 0.0 and jnp.float32
    assert write(tmp_path, pretrained=write.pretrained._replace(model=same))["rows"] == 72
    for key, other in (
        ("weights", {"pretrained": write.pretrained._replace(params=params)}),
        ("fingerprint", {"source": make_source("digits", split="train", image_size=(8, 8))}),
        ("top", {"top": 3, "thresholds": 0.1}),
        ("what", {"what": "dense"}),
        ("fields", {"pretrained": write.pretrained._replace(model=model.clone(norm_eps=1e-5))}),
    ):
        with pytest.raises(InputError, match=f"holds predictions with another {key}: "):
            write(tmp_path, **other)
    assert not list(tmp_path.glob("*.npy"))
    (tmp_path / "predictions.json").unlink()
    with pytest.raises(InputError, match=r"holds part_00000.parquet, but no predictions.json"):
        write(tmp_path)


def test_a_feature_that_float16_cannot_hold_is_refused(write, tmp_path):
    params = {name: 1e6 * x for name, x in write.pretrained.params.items()}
    with pytest.raises(InputError, match="a feature is above 65,504"):
        write(tmp_path, "features", pretrained=write.pretrained._replace(params=params))
    assert not list(tmp_path.glob("part_*"))


def test_each_process_writes_its_share(write, tmp_path, monkeypatch):
    """As two processes do one after the other, the second without the first one's parts."""
    monkeypatch.setattr(processes, "say_to_all", lambda what, find, timeout_s: find())
    monkeypatch.setattr(processes, "agree", lambda *args: None)
    taken = []

    def take(path, ids, rows):
        taken.append((path.name, len(ids), sum(len(x) for x, _ in rows)))

    divided = parts.Parts(tmp_path, 72, 32, ".npz")
    for process in range(2):
        job = types.SimpleNamespace(process_index=process.__int__, process_count=lambda: 2)
        monkeypatch.setattr(parts, "jax", job)
        how = {"what": "features", "batch_size": 24}  # ends within parts
        parts.write_missing(write.pretrained, digits(), divided, take, **how)
    sizes = {f"part_{i:05}.npz": 32 for i in range(2)} | {"part_00002.npz": 8}
    assert {name: size for name, size, _ in taken} == sizes and len(taken) == 3
    assert all(size == found for _, size, found in taken)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["predict", "label"])
def test_processes_killed_at_any_moment(golden, tmp_path, command):
    """One of two processes is killed and three write the rest: the rows of one process."""
    images = np.random.default_rng(0).integers(0, 256, (9000, 16, 16, 3), np.uint8)
    np.savez(tmp_path / "images.npz", train_images=images, train_labels=np.arange(9000) % 3)

    def words(folder):
        if command == "predict":
            return ["predict", f"--init_from={golden / 'hf_vit'}", "--data=arrays:train",
                    f"--data_dir={tmp_path / 'images.npz'}", f"--output={folder}"]  # fmt: skip
        return ["label", "--config=configs/noisy_student.py:debug", f"--workdir={folder}",
                f"--config.init_from={golden / 'hf_vit'}", "--config.study.confidence=0",
                "--config.study.unlabelled=arrays@train", "--config.study.soft_labels=true",
                f"--config.study.unlabelled_dir={tmp_path / 'images.npz'}"]  # fmt: skip

    suffix = {"predict": ".parquet", "label": ".npz"}[command]
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert main(words(alone)) == 0
    for process, number in ((0, 0), (1, 1), (0, 3), (1, 6)):
        with Job(tmp_path, *words(killed), devices=1) as job:
            while len(list(killed.glob(f"part_*{suffix}"))) < number:
                assert job.processes[process].poll() is None, job.everything()
                time.sleep(0.01)
            job.signal(process, signal.SIGKILL)
            assert job.codes(of=[process]) == [-signal.SIGKILL]
        assert not (killed / "summary.json").exists()
    with Job(tmp_path, *words(killed), num_processes=3, devices=1) as job:
        assert job.codes() == [0, 0, 0], job.everything()
    names = sorted(path.name for path in alone.iterdir())
    assert names == sorted(path.name for path in killed.iterdir() if path.name[0] != ".")
    assert len(names) > 10
    for name in names:
        if name != "summary.json":
            assert (killed / name).read_bytes() == (alone / name).read_bytes(), name
