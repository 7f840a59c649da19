"""Prepared sets: the records of the source, in each format, whatever was killed meanwhile."""

import concurrent.futures.process
import dataclasses
import io
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import types
import unittest.mock

import numpy as np
import PIL.Image
import PIL.ImageOps
import pyarrow.parquet as pq
import pytest
from images import encode, make_folder, smooth_image, write_images
from prepared_sets import files_of, make, pictures, plan_of, prepared, training_rows
from table_files import make_table, save_to_disk
from tar_files import write_tar

from vit_jax.base.errors import InputError, OneProcessError
from vit_jax.base.files import write_whole
from vit_jax.curation.formats import Facts, Parquet, Row, Tar
from vit_jax.curation.pictures import Rule
from vit_jax.curation.prepare import Progress, in_processes, verify
from vit_jax.curation.shards import open_splits
from vit_jax.data.host_tf import tf
from vit_jax.data.images.formats import to_pixels
from vit_jax.main import main

FORMATS = ("array_record", "parquet", "tar", "tfrecord")
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Two classes of JPEGs, with a PNG, a WebP, a turned JPEG and one that is cut short."""
    folder = tmp_path_factory.mktemp("images")
    make_folder(folder / "val", {"a": 1, "b": 1})
    root = make_folder(folder / "train", {"a": 4, "b": 4})
    picture = PIL.Image.fromarray(smooth_image(seed=7))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    picture.save(root / "a/turned.jpg", quality=90, exif=exif)
    picture.save(root / "a/other.png")
    picture.save(root / "b/other.webp", lossless=True)
    (root / "b/cut.jpg").write_bytes((root / "b/0.jpg").read_bytes()[:-200])
    return folder


@pytest.fixture(scope="module")
def tar(images, tmp_path_factory):
    plan = plan_of(tmp_path_factory.mktemp("out") / "birds", data_dir=images)
    return plan, make(plan)


def test_the_manifest_counts_what_is_stored_and_names_what_is_not(tar):
    plan, manifest = tar
    train = manifest["splits"]["train"]
    assert (train["records"], train["broken"], train["classes"]) == (11, 1, {"a": 6, "b": 5})
    assert train["height"] == {"least": 60, "mean": 62.7, "greatest": 90}  # one is turned
    assert (
        "train,train/b/cut.jpg,it is damaged; save it again"
        in (plan.folder / "broken.csv").read_text().splitlines()
    )
    stored = json.loads((plan.folder / "manifest.json").read_text())
    assert [file["records"] for file in stored["files"].values()] == [5, 5, 1]
    assert verify(plan.folder) == []


@pytest.mark.parametrize(
    "file_format", [*(pytest.param(f, marks=pytest.mark.slow) for f in FORMATS[1:]), FORMATS[0]]
)
def test_each_format_gives_the_pictures_and_labels_of_the_source(
    images, tmp_path, file_format, tar
):
    plan = plan_of(tmp_path / "birds", file_format, data_dir=images)
    make(plan)
    expected = pictures(plan)
    assert len(expected) == 11
    assert pictures(prepared(plan)) == pictures(prepared(tar[0]))
    for (image, label), (was, label_was) in zip(pictures(prepared(plan)), expected, strict=True):
        assert label == label_was
        np.testing.assert_array_equal(to_pixels(tf.constant(image)), to_pixels(tf.constant(was)))
    assert verify(plan.folder) == []


def test_what_was_killed_is_made_again_with_the_same_bytes(tar):
    plan, manifest = tar
    files, shard = files_of(plan), plan.folder / "train-00001.tar"
    kept = (plan.folder / "train-00000.tar").stat().mtime
    shard.write_bytes(shard.read_bytes()[:-1])  # of a disk that lost its end
    left = ".train-00001.tar.0123abcd.tmp", ".prepared/.train-00001.json.0123abcd.tmp"
    written = plan.folder / ".train-00001.tar.4567abcd.tmp"  # by a process that is still alive
    for path in (written, *(plan.folder / name for name in left)):
        path.write_bytes(b"half")
        ago = 60 if path == written else 2 * 3600
        os.utime(path, (time.time() - ago,) * 2)
    (plan.folder / "manifest.json").unlink()
    assert make(plan) == manifest
    assert [*pathlib.Path(plan.output).rglob(".*.tmp")] == [pathlib.Path(written)]
    written.unlink()
    assert files_of(plan) == files
    assert (plan.folder / "train-00000.tar").stat().mtime == kept


@pytest.mark.parametrize("name", ["broken.csv", "manifest.json"])
def test_a_stop_before_any_file_changes_no_byte(images, tmp_path, tar, monkeypatch, name):
    plan = plan_of(tmp_path / "birds", data_dir=images)

    def write(path, content):
        if path.name == name:
            path.with_name(f".{name}.0123abcd.tmp").write_bytes(b"half")
            raise KeyboardInterrupt
        write_whole(path, content)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        for module in ("prepare", "formats"):
            patched.setattr(f"vit_jax.curation.{module}.write_whole", write)
        make(plan)
    assert not (plan.folder / name).exists()
    make(plan)
    assert files_of(plan) == files_of(tar[0])


def test_an_object_store_gets_the_same_bytes(images, tmp_path, tar, monkeypatch):
    monkeypatch.setattr("vit_jax.curation.shards.is_object", lambda path: True)
    monkeypatch.setattr("vit_jax.curation.shards._BLOCK", 1000)
    make(plan := plan_of(tmp_path / "birds", data_dir=images))
    assert files_of(plan) == files_of(tar[0])


def test_a_set_without_readable_pictures_is_refused(tmp_path):
    for name in ("train/a/0.jpg", "val/a/0.jpg"):
        (tmp_path / "in" / name).parent.mkdir(parents=True)
        (tmp_path / "in" / name).write_bytes(b"none")
    plan = plan_of(tmp_path / "out", data_dir=tmp_path / "in")
    with pytest.raises(InputError, match=r"train: no picture .*: train/a/0.jpg: it holds no"):
        make(plan)
    assert "train/a/0.jpg" in (plan.folder / "broken.csv").read_text()
    with pytest.raises(InputError, match="has no manifest"):
        verify(plan.folder)


def test_a_killed_worker_is_an_error_with_a_remedy(monkeypatch):
    job, pool = concurrent.futures.Future(), unittest.mock.MagicMock()
    job.set_exception(concurrent.futures.process.BrokenProcessPool())
    pool.return_value.__enter__.return_value.submit.return_value = job
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", pool)
    with pytest.raises(OneProcessError, match=r"--workers=2: a worker was killed, .* set fewer"):
        in_processes(2)(print, [1], Progress(1))


def test_verify_finds_a_changed_byte(tar, capsys):
    plan, _ = tar
    shard = plan.folder / "train-00002.tar"
    before = shard.read_bytes()
    shard.write_bytes(before[:700] + b"?" + before[701:])
    code = main(["prepare", "--verify", f"--output={plan.output}"])
    shard.write_bytes(before)
    assert code == 1
    assert "train-00002.tar: has changed; remove it and" in capsys.readouterr().err
    shard.unlink()
    assert verify(plan.folder) == ["train-00002.tar: is missing; prepare again"]
    shard.write_bytes(before)


@pytest.mark.parametrize("file_format", ["tar", pytest.param("parquet", marks=pytest.mark.slow)])
def test_captions_and_several_labels_are_kept(images, tmp_path, file_format):
    rows = [
        {"file": f"{images}/train/a/0.jpg", "labels": ["cat", "dog"],
         "caption": ["two", "half a sign \ud83d", "more"]},
        {"file": f"{images}/train/a/1.jpg", "labels": [], "caption": "none"},
        {"file": f"{images}/train/a/2.jpg", "labels": ["dog"], "caption": []},
    ]  # fmt: skip
    for split in ("train", "val"):
        text = "\n".join(map(json.dumps, rows))
        (tmp_path / f"in/{split}.jsonl").parent.mkdir(exist_ok=True)
        (tmp_path / f"in/{split}.jsonl").write_text(text)
    plan = plan_of(tmp_path / "out", file_format, "list", tmp_path / "in", captions=True)
    assert make(plan)["splits"]["train"]["lost_captions"] == 1
    source = open_splits(prepared(plan))["train"]
    assert source.class_names == ("cat", "dog")
    assert [label for _, label in pictures(prepared(plan))] == [[1, 1], [0, 0], [0, 1]]
    texts = [[c if isinstance(c, str) else c.decode() for c in found]
             for found in source.captions([0, 1, 2])]  # fmt: skip
    assert texts == [["two", "more"], ["none"], []]


def test_captions_are_read_as_in_training(tmp_path):
    members = {"0.jpg": encode(smooth_image(seed=0)), "0.cls": b"0", "0.txt": b"\xef\xbb\xbfa dog"}
    where = write_tar(tmp_path / "in/train.tar", members.items()).parent
    make(plan := plan_of(tmp_path / "out", "tar", "tar", where, captions=True))
    assert [*open_splits(prepared(plan))["train"].captions([0])] == [["a dog"]]


@pytest.mark.parametrize(
    ("names", "labels"), [("123", [1, 2]), ("10", [0, 1]), ("123", [1, -1, 0]), ("0a2", [2, 2])]
)
def test_names_that_are_numbers_are_no_labels_in_tar(tmp_path, names, labels):
    """The label 1 is the second class, "2", and not the class "1"."""
    images = np.stack([smooth_image(seed=i) for i in range(len(labels))])
    where = tmp_path / "all.npz"
    np.savez(where, train_images=images, train_labels=labels, class_names=[*names])
    make(plan := plan_of(tmp_path / "out", "tar", "arrays", where))
    assert open_splits(prepared(plan))["train"].class_names == tuple(names)
    assert [label for _, label in pictures(prepared(plan))] == [
        [int(label == c) for c in range(len(names))] if -1 in labels else label for label in labels
    ]


@pytest.mark.parametrize("source", ["folder", "tar"])
def test_a_turned_jpeg_stays_a_jpeg(images, tmp_path, source):
    turned = images / "train/a/turned.jpg"
    where = images
    if source == "tar":
        members = {"0.jpg": turned.read_bytes(), "0.cls": b"0"}
        where = write_tar(tmp_path / "in/train.tar", members.items()).parent
    make(plan := plan_of(tmp_path / "out", "tar", source, where))
    stored = [tf.constant(image) for image, _ in pictures(prepared(plan))]
    found = [image.numpy() for image in stored if to_pixels(image).shape[0] == 90]
    assert len(found) == 1 and found[0].startswith(b"\xff\xd8") and b"Exif" not in found[0]
    expected = np.asarray(PIL.ImageOps.exif_transpose(PIL.Image.open(turned)), float)
    assert abs(to_pixels(tf.constant(found[0])).numpy() - expected).mean() < 3


def test_names_of_files_in_tar_stay_readable(tmp_path):
    path = tmp_path / "train-00000.tar"
    names = ("a/\u732b 1.x.jpg", "\u732b" * 99, "\udcff.jpg", "")
    rows = (Row(i, encode(smooth_image(seed=i)), (), (), name) for i, name in enumerate(names))
    Tar().write(str(path), rows, Facts((), False, False, True))
    with tarfile.open(path, encoding="utf-8") as tar:
        assert tar.getnames() == [
            "000000000/\u732b_1_x.jpg", f"000000001/{26 * chr(0x732B)}.jpg",
            "000000002/_.jpg", "000000003.jpg",
        ]  # fmt: skip


@pytest.mark.parametrize("file_format", ["tar", "parquet"])
def test_pictures_without_a_label_are_of_no_class(tmp_path, file_format):
    images = np.stack([smooth_image(seed=i) for i in range(4)])
    where = tmp_path / "all.npz"
    np.savez(where, train_images=images, train_labels=[1, -1, 0, 1], class_names=["a", "b"])
    plan = plan_of(tmp_path / "out", file_format, "arrays", where)
    train = make(plan)["splits"]["train"]
    assert (train["records"], train["unlabelled"], train["classes"]) == (4, 1, {"a": 1, "b": 2})
    assert verify(plan.folder) == []
    assert [label for _, label in pictures(prepared(plan))] == [[0, 1], [0, 0], [1, 0], [0, 1]]


def test_a_file_name_that_is_not_utf8_goes_into_parquet(tmp_path):
    row = Row(0, encode(smooth_image(seed=0)), [0], [], os.fsdecode(b"\xff0.jpg"))
    path = tmp_path / "train-00000.parquet"
    Parquet().write(str(path), [row], Facts(("a",), False, False, True))
    assert pq.read_table(path)["image"].to_pylist()[0]["path"] == "\ufffd0.jpg"


@pytest.mark.parametrize(
    ("keys", "changes", "said"),
    [
        ({}, {"rule": Rule(32)}, "side None -> 32"),
        ({}, {"captions": True}, "captions False -> True"),
        ({"channels": 1}, {}, "channels 3 -> 1"),
        ({"pixel_range": (0.0, 9.0)}, {}, r"pixel_range None -> \[0.0, 9.0\]"),
    ],
)
def test_another_set_is_not_mixed_in(tar, keys, changes, said):
    plan, _ = tar
    data = dataclasses.replace(plan.data, **keys)
    with pytest.raises(InputError, match=f"prepared otherwise: {said}; restore"):
        make(dataclasses.replace(plan, data=data, **changes))


def test_tuples_of_the_settings_are_found_again(images, tmp_path):
    plan = plan_of(tmp_path / "my out", data_dir=images)
    data = dataclasses.replace(plan.data, image_size=(32, 32), pixel_range=(0.0, 9.0))
    manifest = make(plan := dataclasses.replace(plan, data=data))
    assert manifest == make(plan)
    read_by = ("name=tar", f"data_dir={plan.output}", "pixel_range=(0.0, 9.0)")
    assert shlex.split(manifest["read_by"]) == [f"--config.data.{key}" for key in read_by]


def test_a_rule_never_enlarges_and_keeps_bytes_that_fit(tmp_path):
    make_folder(tmp_path / "in/val", {"a": 1})
    large, small = smooth_image(seed=0), encode(smooth_image(20, 30, seed=1))
    names = {"a/0.jpg": encode(large, quality=95), "b/0.jpg": small, "b/1.png": large}
    write_images(tmp_path / "in/train", names)
    plan = plan_of(tmp_path / "out", data_dir=tmp_path / "in", rule=Rule(30))
    make(plan)
    (first, _), (second, _), (third, _) = pictures(prepared(plan))
    assert second == small
    assert (first[:2], third[:4]) == (b"\xff\xd8", b"\x89PNG")
    expected = PIL.Image.fromarray(large).resize((45, 30), PIL.Image.BOX)
    for image, most in ((first, 8), (third, 0.5)):  # JPEG halves the resolution of colours
        found = PIL.Image.open(io.BytesIO(image))
        assert found.size == (45, 30)
        difference = np.asarray(found, float) - np.asarray(expected)
        assert abs(difference).mean() < most


def test_a_pipeline_says_how_far_it_is_and_how_it_ends(monkeypatch, caplog):
    """By the counters of a runner that does not block."""
    beam = unittest.mock.MagicMock()
    for name in ("", ".metrics", ".options.pipeline_options", ".runners.runner"):
        monkeypatch.setitem(sys.modules, f"apache_beam{name}", beam)
    from vit_jax.curation.beam import on_beam

    beam.PipelineState.DONE = "DONE"
    result = beam.Pipeline.return_value.run.return_value
    counter = types.SimpleNamespace(result=2)
    result.metrics.return_value.query.return_value = {"counters": [counter]}
    monkeypatch.setattr("vit_jax.curation.prepare._SAID_S", 0)
    beam.PipelineState.is_terminal.side_effect = [False, True] * 2
    result.state = "DONE"
    with caplog.at_level("INFO", "vit_jax"):
        on_beam([])(print, [1, 2, 3], Progress(3))
    assert re.search(r"2 of 3 parts, 2 pictures, \d+/s, 0:00:0\d left", caplog.text)
    result.state = "CANCELLED"
    with pytest.raises(OneProcessError, match="--beam: the pipeline ended in the state CANCELLED"):
        on_beam([])(print, [], Progress(0))


# What takes minutes


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """1,000 pictures of CIFAR-10 as a folder, and a list of them."""
    import tensorflow_datasets as tfds

    where = pathlib.Path(os.environ.get("VIT_JAX_DATA", "none")) / "cifar10/3.0.2"
    if not where.exists():
        pytest.skip("needs the prepared data set cifar10 below VIT_JAX_DATA")
    root = tmp_path_factory.mktemp("cifar") / "images"
    builder = tfds.builder_from_directory(where)
    names = builder.info.features["label"].names
    split = builder.as_dataset("test[:1000]", decoders={"image": tfds.decode.SkipDecoding()})
    lines = ["file,label,split"]
    for i, example in enumerate(split.as_numpy_iterator()):
        path = root / "train" / names[example["label"]] / f"{i:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(example["image"])
        lines.append(f"{path.relative_to(root)},{path.parent.name},train")
        if i < 100:  # a folder for `val`, so that no training pictures are held out
            (root / "val" / path.parent.name).mkdir(parents=True, exist_ok=True)
            (root / "val" / path.parent.name / path.name).write_bytes(example["image"])
            lines.append(f"val/{path.parent.name}/{path.name},{path.parent.name},val")
    (root / "list.csv").write_text("\n".join([lines[0], *sorted(lines[1:])]) + "\n")
    return root


def other_sources(cifar, folder, expected):
    """Plans that read the same pictures as a list, as arrays and as an Arrow file of `datasets`."""
    names = sorted(path.name for path in (cifar / "train").iterdir())
    images, labels = zip(*expected, strict=True)
    pixels = np.stack([to_pixels(tf.constant(image)) for image in images])
    folder.mkdir()
    np.savez(folder / "all.npz", train_images=pixels, train_labels=labels, class_names=names)
    save_to_disk({"train": make_table(images, [*labels], names)}, folder / "arrow")
    return [
        plan_of("", name="list", data_dir=cifar / "list.csv"),
        plan_of("", name="arrays", data_dir=folder / "all.npz"),
        plan_of("", name="arrow", data_dir=folder / "arrow"),
    ]


@pytest.mark.slow
def test_cifar10_from_each_source_to_each_format(cifar, tmp_path):
    """A folder to each format; from each of these, and from other sources, to each again."""
    first = plan_of(tmp_path / "f", data_dir=cifar, shard_size=300)
    rows, expected = training_rows(first, (32, 32)), pictures(first)
    assert len(expected) == 1000
    plans = []
    for file_format in FORMATS:
        plan = plan_of(tmp_path / f"a_{file_format}", file_format, data_dir=cifar, shard_size=300)
        make(plan)
        plans.append(prepared(plan))
    for number, source in enumerate([*plans, *other_sources(cifar, tmp_path / "o", expected)]):
        for file_format in FORMATS:
            output = str(tmp_path / f"b{number}_{file_format}")
            plan = dataclasses.replace(source, output=output, format=file_format, shard_size=300)
            make(plan)
            what = source.data.name, file_format
            assert training_rows(prepared(plan), (32, 32)) == rows, what
            if source.data.name != "arrays":
                assert pictures(prepared(plan)) == expected, what
                continue
            for (image, label), (was, label_was) in zip(
                pictures(prepared(plan)), expected, strict=True
            ):
                assert label == label_was
                np.testing.assert_array_equal(
                    to_pixels(tf.constant(image)), to_pixels(tf.constant(was))
                )


@pytest.mark.slow
def test_the_files_depend_on_neither_workers_nor_the_engine(cifar, tmp_path):
    pytest.importorskip("apache_beam", reason="needs the extra curation")
    from vit_jax.curation.beam import on_beam
    from vit_jax.curation.prepare import prepare

    here = plan_of(tmp_path / "1/cifar", data_dir=cifar, shard_size=100, shuffle_seed=3)
    make(here)
    there = plan_of(tmp_path / "2/cifar", data_dir=cifar, shard_size=100, shuffle_seed=3)
    make(there, workers=2)
    assert files_of(there) == files_of(here)
    for number, options in enumerate((
        ["--direct_running_mode=multi_processing", "--direct_num_workers=2"],
        ["--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=LOOPBACK"],
    ), 3):  # fmt: skip
        by_beam = plan_of(tmp_path / f"{number}/cifar", data_dir=cifar, shard_size=100,
                          shuffle_seed=3)  # fmt: skip
        prepare(by_beam, "vit_jax prepare", on_beam(options))
        assert files_of(by_beam) == files_of(here)


@pytest.mark.slow
def test_ten_kills_change_no_byte(cifar, tmp_path):
    words = [sys.executable, "-m", "vit_jax.main", "prepare", "folder", "--format=tar",
             f"--config.data.data_dir={cifar}", "--shard_size=20", "--workers=2"]  # fmt: skip
    whole, killed = tmp_path / "whole/cifar", tmp_path / "killed/cifar"
    subprocess.run([*words, f"--output={whole}"], check=True, cwd=ROOT)
    shards, drawn, kills = 50, random.Random(0), 0

    def kill(reached, wait_s):
        """Whether the command was killed that long after `reached`, before its end."""
        job = subprocess.Popen([*words, f"--output={killed}"], cwd=ROOT)
        while job.poll() is None and not reached():
            time.sleep(0.001)
        time.sleep(wait_s)
        was_running = job.poll() is None
        job.kill()
        job.wait()
        return was_running

    assert kill((killed / ".prepared").exists, 0)
    while kills < 10:
        before = len([*killed.glob(".prepared/*-*.json")])

        def made_two(before=before):
            return len([*killed.glob(".prepared/*-*.json")]) >= before + 2

        kills += kill(made_two, drawn.random() / 5)
        if before + 2 >= shards:  # the last kills meet a set that is begun again
            shutil.rmtree(killed / ".prepared", ignore_errors=True)
            shutil.rmtree(killed, ignore_errors=True)
    time.sleep(2)  # workers end with their parent
    kill((killed / "broken.csv").exists, 0)
    subprocess.run([*words, f"--output={killed}"], check=True, cwd=ROOT)
    assert files_of(plan_of(killed)) == files_of(plan_of(whole))
