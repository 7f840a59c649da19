"""Near duplicates: the PDQ hash, pairs that are found, what is left out, and the page."""

import json
import sys
import types

import numpy as np
import PIL.Image
import pytest
from etils import epath
from images import encode, write_images

from vit_jax.base.errors import InputError
from vit_jax.config.sections import Data
from vit_jax.curation import duplicates, looks
from vit_jax.curation.prepare import Progress, in_processes
from vit_jax.curation.shards import open_split
from vit_jax.data import make_source
from vit_jax.main import main


def test_hashes_are_those_of_pdqhash():
    """Of pdqhash 0.2.8, whose bits come in the other order, for random grey images."""
    grey = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    plain, mirrored = looks.pdq(grey[None].astype(np.float32))[0]
    assert plain.tobytes().hex() == (
        "f76a41e94e64fde5e667bc9c90db22b17a325ca0d21050e1f3c691cfccb2605a"
    )
    assert mirrored.tobytes().hex() == (
        "5dc0eb43e4ce574f4ccd16363a71881bd098f60a78bafa4b596c3b656618caf0"
    )
    assert not looks.pdq(np.full((1, 64, 64), 99.0)).any()  # too flat


def flipped(hashes, bits, rng):
    """`hashes` (n, 4) with so many bits changed."""
    found = np.unpackbits(hashes.view(np.uint8), axis=1)
    for row, number in zip(found, bits, strict=True):
        row[rng.choice(256, number, replace=False)] ^= 1
    return np.packbits(found, axis=1).view(np.uint64)


@pytest.mark.parametrize(
    ("large", "most", "share"), [(False, 31, 1.0), (True, 14, 1.0), (True, 24, 0.8)]
)
def test_all_pairs_up_to_a_distance_are_found(monkeypatch, large, most, share):
    rng = np.random.default_rng(0)
    plain = rng.integers(0, 2**64, (60, 4), np.uint64)
    bits = np.arange(60) % (most + 2) + (most - 14 if most == 24 else 0)
    bits = np.minimum(bits, most + 1)
    near = flipped(plain, bits, rng)
    mirrors = rng.integers(0, 2**64, (120, 4), np.uint64)
    hashes = np.stack([np.concatenate([plain, near]), mirrors], 1)
    monkeypatch.setattr(duplicates, "_LARGE", 0 if large else 1000)
    monkeypatch.setattr(duplicates, "_BLOCK", 100)
    found = duplicates.of_records(duplicates.near_hashes(hashes, most))
    expected = {(i, i + 60, b) for i, b in enumerate(bits.tolist()) if b <= most}
    assert {*map(tuple, found.tolist())} <= expected
    assert len(found) >= share * len(expected) and (share < 1 or len(found) == len(expected))


def test_equal_hashes_are_paired_with_the_first_only():
    same = np.tile(np.random.default_rng(0).integers(0, 2**64, (1, 1, 4), np.uint64), (1000, 2, 1))
    found = duplicates.of_records(duplicates.near_hashes(same, 31))
    assert found.tolist() == [[0, i, 0] for i in range(1, 1000)]


@pytest.mark.parametrize("large", [False, True])
def test_each_pair_of_many_like_hashes_is_found_once(monkeypatch, large):
    """300 frames of a still scene share most of their keys."""
    rng = np.random.default_rng(0)
    frames = np.repeat(rng.integers(0, 2**64, (1, 4), np.uint64), 300, axis=0)
    frames = flipped(frames, np.full(300, 4), rng)
    assert len(np.unique(frames, axis=0)) == 300
    monkeypatch.setattr(duplicates, "_LARGE", 0 if large else 1000)
    found = duplicates.near_hashes(np.stack([frames, 0 * frames], 1), 8)
    assert len(found) == len(duplicates.of_records(found)) == 300 * 299 // 2


def test_of_several_the_first_stays_and_those_of_other_sets_always():
    pairs = np.array([[0, 1], [0, 3], [3, 4], [5, 7], [6, 7]])
    assert duplicates.leave_out(pairs, 2, 9).tolist() == [
        False, False, False, True, True, False, True, True, False
    ]  # fmt: skip
    assert not duplicates.leave_out(np.zeros((0, 2), int), 1, 3).any()


def test_a_copy_of_a_copy_of_a_test_picture_is_left_out():
    """Equal hashes are paired with one of them, which alone is paired with others."""
    hashes = np.zeros((3, 2, 4), np.uint64)
    hashes[:, 0] = np.random.default_rng(0).integers(0, 1 << 63, 4, np.uint64)
    hashes[1:, 0, 0] ^= np.uint64(7)
    pairs = duplicates.of_records(duplicates.near_hashes(hashes, 31))
    assert pairs.tolist() == [[0, 1, 3], [1, 2, 0]]
    assert duplicates.leave_out(pairs[:, :2], 1, 3).tolist() == [False, True, True]


def test_features_pair_what_hashes_do_not():
    pytest.importorskip("usearch", reason="needs the extra curation")
    x = np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)
    x[31], x[7] = 2 * x[4], x[20] + 0.05 * x[7]
    x[9] = np.nan
    pairs, cosine = duplicates.pairs_of_features(x, 0.95)
    assert pairs.tolist() == [[4, 31], [7, 20]] and cosine[0] > 0.999 > cosine[1] > 0.95


def test_a_pair_that_both_find_has_both_distances(monkeypatch):
    source = types.SimpleNamespace(num_examples=5)
    pairs, cosine = np.array([[0, 1], [1, 2], [2, 4]]), np.float32([0.99, 0.98, 0.97])
    monkeypatch.setattr(duplicates, "pairs_of_features", lambda *_: (pairs, cosine))
    by_hash = np.array([[0, 8, 3], [4, 8, 5], [2, 4, 7]])  # of hashes, two for each record
    found = duplicates.find([source], by_hash, [np.zeros((5, 2))], 0.9)
    assert [*zip(found.pairs.tolist(), found.bits, strict=True)] == [
        ([0, 4], 3), ([2, 4], 5), ([1, 2], 7), ([0, 1], -1)
    ]  # fmt: skip
    np.testing.assert_array_equal(found.cosine, np.float32([np.nan, 0.97, 0.98, 0.99]))


def detailed(seed):
    """An image of many frequencies, as photographs are: uint8 (120, 160, 3)."""
    noise = np.random.default_rng(seed).integers(0, 256, (15, 20, 3), np.uint8)
    return PIL.Image.fromarray(noise).resize((160, 120), PIL.Image.BICUBIC)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Two splits; `train` has pictures of its own and of `val` again, one mirrored."""
    root = tmp_path_factory.mktemp("images")
    mirrored = detailed(60).transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT).resize((80, 60))
    return write_images(root, {
        "val/a/0.jpg": encode(np.asarray(detailed(0))),
        "train/a/0.jpg": encode(np.asarray(detailed(50))),
        "train/a/leak.jpg": encode(np.asarray(detailed(0)), quality=60),
        "train/b/1.png": np.asarray(detailed(60)),
        "train/b/mirror.jpg": encode(np.asarray(mirrored)),
        "train/b/broken.jpg": b"none",
        "train/b/white.png": np.full((40, 40, 3), 255, np.uint8),
        "train/b/white2.png": np.full((50, 40, 3), 255, np.uint8),
    })  # fmt: skip


def words_of(images, output, *more):
    where = f"--config.data.data_dir={images}"
    return ["duplicates", "folder", where, f"--output={output}", "--workers=1", *more]


@pytest.mark.slow
def test_the_command_lists_what_a_run_leaves_out(images, tmp_path, capsys):
    pytest.importorskip("jinja2", reason="needs the extra report")
    assert main(words_of(images, tmp_path / "out", "--against=folder:val")) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == 2
    lines = (tmp_path / "out/pairs.csv").read_text().splitlines()
    near = {(line.split(",")[1], line.split(",")[5]) for line in lines[1:]}
    assert near == {("train/a/leak.jpg", "val/a/0.jpg"), ("train/b/mirror.jpg", "train/b/1.png")}
    where = {"split": "train", "image_size": (8, 8), "data_dir": str(images)}
    left = make_source("folder", exclude=str(tmp_path / "out/exclude.npz"), **where)
    names = [left.record_name(i) for i in range(left.num_examples)]
    assert len(names) == 5 and "train/a/leak.jpg" not in names
    page = (tmp_path / "out/page.html").read_text()
    assert page.count("<img") == 4 and "<script" not in page


def test_features_of_other_records_are_refused(images, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", features=np.zeros((3, 2)), record=["a", "b", "c"])
    assert main(words_of(images, tmp_path / "out", f"--features={tmp_path}/x.npz")) == 2
    assert "has 3 records, folder train 7 with other names" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def write_array(path):
    with open(path, "wb") as file:
        np.save(file, np.zeros((7, 2)))


def write_cut(path):
    np.savez(path, features=np.zeros((7, 2)), record=["a"] * 7)
    path.write_bytes(path.read_bytes()[:-50])


@pytest.mark.parametrize("write", [write_array, write_cut, lambda path: path.touch()])
def test_files_that_hold_no_features_are_refused(tmp_path, write):
    write(path := tmp_path / "x.npz")
    with pytest.raises(InputError, match=r"x\.npz: cannot be read"):
        duplicates.read_features(str(path), types.SimpleNamespace(num_examples=7))


@pytest.mark.parametrize("missing", ["jinja2", "usearch"])
def test_a_missing_package_is_found_before_the_work(images, tmp_path, capsys, monkeypatch, missing):
    names = make_source("folder", split="train", image_size=(8, 8), data_dir=str(images))
    record = [names.record_name(i) for i in range(names.num_examples)]
    np.savez(tmp_path / "x.npz", features=np.ones((len(record), 2)), record=record)
    monkeypatch.setitem(sys.modules, missing, None)
    more = [f"--features={tmp_path}/x.npz"] * (missing == "usearch")
    assert main(words_of(images, tmp_path / "out", *more)) == 2
    assert missing in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("large", [False, True])
def test_beam_finds_the_same_pairs(images, tmp_path, monkeypatch, large):
    """Of pictures, of hashes that are equal, and of such as differ in some bits."""
    pytest.importorskip("apache_beam", reason="needs the extra curation")
    from vit_jax.curation.beam import pairs_on_beam

    monkeypatch.setattr(duplicates, "_LARGE", 0 if large else 1000)
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, (40, 2, 4), np.uint64)
    hashes[10:16] = hashes[0]
    hashes[20:30, 1] = flipped(hashes[:10, 0], np.arange(1, 11), rng)
    hashes[30:34, 0] = flipped(np.repeat(hashes[3:4, 0], 4, 0), np.arange(2, 6), rng)
    hashes[39] = 0  # flat
    parts = []
    for first, stop, offset in ((0, 7, 0), (7, 15, 0), (0, 25, 15)):
        path = tmp_path / f"{offset}-{first}"
        path.write_bytes(hashes[offset + first : offset + stop].tobytes())
        where = {"data": Data(name="folder"), "fingerprint": "", "path": str(path)}
        parts.append(duplicates.Part(first=first, stop=stop, offset=offset, **where))
    left = tmp_path / duplicates.FOLDER / "pairs/pairs-00007-of-00008"  # by a run with more shards
    left.parent.mkdir(parents=True)
    left.write_text("2 77 0\n")
    # In this process, where the number of a large set is the changed one.
    found = pairs_on_beam(["--runner=DirectRunner"], epath.Path(tmp_path))(parts, 20)
    expected = duplicates.pairs_here(parts, 20)
    assert len(expected) > 30 and not left.parent.exists()
    in_order = [
        sorted((*sorted(pair), bits) for *pair, bits in pairs.tolist())
        for pairs in (found, expected)
    ]
    assert in_order[0] == in_order[1]


@pytest.mark.slow
def test_beam_hashes_as_processes_do(images, tmp_path):
    pytest.importorskip("apache_beam", reason="needs the extra curation")
    from vit_jax.curation.beam import on_beam, pairs_on_beam

    data = Data(name="folder", data_dir=str(images))
    sets = [(data, open_split(data, "train", False))]
    found = []
    for name in ("here", "beam"):
        parts = duplicates.parts_of(epath.Path(tmp_path / name), sets)
        options = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]
        runner = in_processes(1) if name == "here" else on_beam(options)
        finder = pairs_on_beam(options, epath.Path(tmp_path)) if name == "beam" else None
        runner(duplicates.hash_part, parts, Progress(len(parts)))
        pairs = (finder or duplicates.pairs_here)(parts, 31)
        found.append(duplicates.of_records(pairs).tolist())
    assert found[0] == found[1] and len(found[0]) == 1
