import errno
import os

import pytest
from etils import epath

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.base.files import (
    LiteralPath,
    cache_folder,
    check_folder,
    check_output,
    replaced,
    write_whole,
)


@pytest.mark.parametrize(
    ("content", "stored"),
    [("é\n", b"\xc3\xa9\n"), (b"\x89PNG\r\n\x00\xff", b"\x89PNG\r\n\x00\xff"), (b"", b"")],
)
def test_a_file_is_replaced_whole_by_text_or_bytes(tmp_path, content, stored):
    path = epath.Path(tmp_path) / "file"
    path.write_bytes(b"what was there before, and longer")
    write_whole(path, content)
    assert path.read_bytes() == stored
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_file_changes_when_the_block_ends(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replaced(path) as first, replaced(path) as second:
        first.write(b"first")
        second.write(b"second")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"first"  # whose block ended last
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_an_error_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replaced(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_by_the_file_that_was_to_be_written(tmp_path, monkeypatch, number):
    def fail(file):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=f"{os.strerror(number)}: '{tmp_path}/file'"):
        write_whole(epath.Path(tmp_path / "file"), "content")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("root", "expected"), [("", "~"), ("~/c", "~/c"), ("/c", "/c")])
def test_the_cache_folder(monkeypatch, root, expected):
    monkeypatch.setenv("XDG_CACHE_HOME", root)
    expected = "~/.cache" if expected == "~" else expected
    assert str(cache_folder("plans")) == os.path.expanduser(f"{expected}/vit_jax/plans")


@pytest.mark.parametrize("name", ["[1]", "*", "?", "a"])
def test_files_are_found_below_folders_whose_names_are_patterns(tmp_path, name):
    folder = LiteralPath(tmp_path) / name
    for other in ("1", "a", name):
        (tmp_path / other / "inner").mkdir(parents=True, exist_ok=True)
        (tmp_path / other / "inner/[1].png").write_bytes(b"")
    assert [*folder.glob("*/*.png")] == [folder / "inner/[1].png"]
    assert [*(folder / "inner").glob("*.png")] == [folder / "inner/[1].png"]
    assert os.fspath(LiteralPath("gs://bucket/run")) == "gs://bucket/run"


def test_a_link_to_no_folder_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    for path in ("link", "link/below"):
        with pytest.raises(InputError, match="link is a link to nowhere, which does not exist"):
            check_folder(epath.Path(tmp_path / path), "--workdir")


@pytest.mark.parametrize("kind", [files.LocalFile, files.StoredObject])
@pytest.mark.parametrize("before", [b"", b"old\n"])
def test_a_log_is_continued(tmp_path, monkeypatch, kind, before):
    """On a disk the old lines, which may be gigabytes, are neither read nor written again."""
    path = epath.Path(tmp_path / "log")
    if before:
        path.write_bytes(before)
    if kind is files.LocalFile:
        monkeypatch.setattr(files, "replaced", None)
    log = kind(path, None)
    log.write(b"new\n")
    log.close()
    assert path.read_bytes() == before + b"new\n"


@pytest.mark.parametrize("check", [check_folder, check_output])
def test_a_folder_that_takes_no_file_is_refused(tmp_path, check):
    """Also /proc, which looks writable to root."""
    with pytest.raises(InputError, match=r"^--output=/proc/x: /proc is not writable \("):
        check(epath.Path("/proc/x"), "--output")
    check(epath.Path(tmp_path / "x"), "--output")
    assert not [*tmp_path.iterdir()]
