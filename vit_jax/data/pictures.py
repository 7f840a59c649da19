"""Files of pictures: which are read, how they become JPEG or PNG bytes, how messages call them.

JPEG and PNG files are passed on as they are, to be decoded by TensorFlow. Pillow decodes the rest:
WebP, BMP, the first frame of a GIF or TIFF, and pictures that their EXIF orientation turns. These
become BMP bytes, or PNG bytes if they have alpha, so that later stages know three formats only.
"""

from __future__ import annotations

import collections
import io
import logging
import os
import re
import stat
import warnings
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from etils import epy

from vit_jax.data.host_tf import tf

with epy.lazy_imports():
    import PIL.Image

logger = logging.getLogger("vit_jax")

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_PNG = b"\x89PNG\r\n\x1a\n"
# EXIF data begin so in a JPEG, and in a PNG. In a JPEG they are looked for near the beginning:
# behind it a thumbnail might hold these bytes, at the cost of time. A PNG has them anywhere.
_EXIF = rb"\C*(Exif\x00\x00|eXIf)\C*"
_EXIF_WITHIN = 1 << 16
_ORIENTATION = 0x0112  # the tag's number
# Orientation -> how Pillow undoes it, by number: Image.Transpose.FLIP_LEFT_RIGHT and so on.
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}

_32_BITS = ("I", "F")  # Pillow's modes
_EXAMPLES = 3  # names of files in a message

_said: set[str] = set()


def read_picture(path: tf.Tensor, exif: bool = True) -> tf.Tensor:
    """The picture in the file `path` as JPEG, PNG or BMP bytes; see `as_known_format`."""
    return as_known_format(tf.io.read_file(path), exif)


def as_known_format(encoded: tf.Tensor, exif: bool = True) -> tf.Tensor:
    """`encoded` bytes of a picture, a scalar string, as JPEG, PNG or BMP bytes.

    `exif` turns the picture as its EXIF orientation says. Bytes that hold no picture become empty,
    which no decoder takes.
    """
    is_png = tf.strings.substr(encoded, 0, len(_PNG)) == _PNG
    plain = tf.io.is_jpeg(encoded) | is_png
    if exif:
        within = tf.where(is_png, tf.int32.max, _EXIF_WITHIN)
        plain &= ~tf.strings.regex_full_match(tf.strings.substr(encoded, 0, within), _EXIF)

    def convert(encoded):
        # Bytes, or an array of one object; an array of bytes would lose NULs at its end.
        encoded = encoded if isinstance(encoded, bytes) else encoded.item()
        return np.array(to_known_format(encoded, exif), object)

    converted = tf.cond(
        plain,
        lambda: encoded,
        lambda: tf.numpy_function(convert, [encoded], tf.string, stateful=False),
    )
    return tf.ensure_shape(converted, [])


def to_known_format(encoded: bytes, exif: bool = True) -> bytes:
    """As `as_known_format`, of bytes and by Pillow."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, and of large pictures
            image = PIL.Image.open(io.BytesIO(encoded))
            turn = None
            if image.format == "TIFF":  # which Pillow turns when it loads them
                if not exif:
                    image.getexif()[_ORIENTATION] = 1
            elif exif:
                turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
            if image.format in ("JPEG", "PNG") and turn is None:
                return encoded
            pixels = to_8_bit(image)
            if turn is not None:
                pixels = pixels.transpose(PIL.Image.Transpose(turn))
            buffer = io.BytesIO()
            if pixels.mode == "RGB":
                pixels.save(buffer, "BMP")  # a tenth of the time of an uncompressed PNG
            else:
                pixels.save(buffer, "PNG", compress_level=0)
            return buffer.getvalue()
    except Exception:  # Pillow's decoders raise what they like of broken files
        return b""


def why_file_unreadable(path: str | os.PathLike) -> str:
    """The reason why a picture cannot be read, and the remedy; "" if Pillow can."""
    try:
        with open(path, "rb") as file:
            encoded = file.read()
    except OSError as e:
        if os.path.islink(path):
            return "it is a link that leads to no file; restore its target"
        gone = isinstance(e, FileNotFoundError)
        return "there is no such file; restore it" if gone else f"{e.strerror}; check your rights"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = PIL.Image.open(io.BytesIO(encoded))
            image.load()
            if image.mode not in _32_BITS:
                return ""
    except Exception:  # Pillow's decoders raise what they like of broken files
        pass
    return why_unreadable(encoded)


def why_unreadable(encoded: bytes) -> str:
    """The reason why `to_known_format`, or a decoder, cannot read `encoded`, and the remedy."""
    if not encoded:
        return "it is empty; copy it again"
    if re.match(rb"\s*<(!doctype html|html)", encoded, re.IGNORECASE):
        return "it is an HTML page; download the picture itself"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mode = PIL.Image.open(io.BytesIO(encoded)).mode
    except PIL.Image.DecompressionBombError:
        return "it has more than 178 megapixels, which Pillow refuses; save it smaller"
    except Exception:  # Pillow's decoders raise what they like of broken files
        return "it holds no picture; needed: JPEG, PNG, WebP, BMP, GIF or TIFF"
    if mode in _32_BITS:
        return "its pixels have 32 bits, and nothing states their range; save it with 8 or 16 bits"
    return "it is damaged; save it again"


def to_8_bit(image: PIL.Image.Image) -> PIL.Image.Image:
    """The first frame in RGB or RGBA of 8 bits, as Pillow converts it.

    Of 16-bit grey the high byte is taken, as of a PNG's 16-bit colours; Pillow would clip at 255.

    Raises:
      ValueError: pixels of 32 bits, whose range nothing states.
    """
    if image.mode in _32_BITS:
        raise ValueError(f"pixels of mode {image.mode}, whose range is not stated")
    if image.mode.startswith("I;16"):
        high_bytes = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        image = PIL.Image.fromarray(high_bytes)
    if image.mode == "La":  # Pillow converts it to this mode only
        image = image.convert("LA")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def shown(path: str) -> str:
    """`path` as messages show it: bytes that are not UTF-8 and unprintable characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in path)


def as_paths(paths: Sequence[str]) -> tf.Tensor:
    """Paths as a tensor of strings (n,), those that are not UTF-8 too."""
    return tf.constant([os.fsencode(path) for path in paths], tf.string)


def look_up(path: str | os.PathLike, *, or_folder: bool = False) -> tuple[int | None, int]:
    """(bytes, identity) of a file; the identity is the same for all links to it.

    -1 bytes if it does not exist, as behind a dangling link. None for a folder, unless `or_folder`,
    and for a pipe, a socket or a device, whose reading may never end.
    """
    try:
        found = os.stat(path)
    except OSError:
        return -1, 0
    has_end = stat.S_ISREG(found.st_mode) or (or_folder and stat.S_ISDIR(found.st_mode))
    identity = found.st_dev << 64 | found.st_ino if found.st_ino else 0
    return found.st_size if has_end else None, identity


class Doubles:
    """Finds the names that belong to one file, as links give it several."""

    def __init__(self):
        self._first: dict[int, str] = {}
        self._names: dict[str, list[str]] = {}

    def add(self, name: str, identity: int) -> None:
        """Add a file; one with the identity 0 is none that has others."""
        first = self._first.setdefault(identity, name) if identity else name
        if first != name:
            self._names.setdefault(first, [first]).append(name)

    def groups(self, root: str | os.PathLike, classes: Mapping[str, str]) -> dict[str, str]:
        """{name: the first name of its file} of those in `classes` that share a file.

        Names are paths from `root`. Warns, once a process, of the links among them.
        """
        beginning = os.fspath(root) + os.sep
        same: dict[str, str] = {}
        for names in self._names.values():
            listed = [n for n in (name.removeprefix(beginning) for name in names) if n in classes]
            if len(listed) > 1:
                same |= dict.fromkeys(listed, min(listed))
        links = sorted(name for name, first in same.items() if name != first)
        other = [name for name in links if classes[name] != classes[same[name]]]
        for what, names in (("count several times", links), ("have several labels", other)):
            if names:
                pairs = [f"{shown(name)} is {shown(same[name])}" for name in names[:_EXAMPLES]]
                more = f" and {len(names) - _EXAMPLES:,} more" if len(names) > _EXAMPLES else ""
                warn_once(
                    f"{shown(os.fspath(root))}: {len(names):,} pictures {what}, by links: "
                    f"{', '.join(pairs)}{more}; remove the links unless you mean them"
                )
        return same


class Walk:
    """Finds the pictures at any depth below folders, and notes what it skips.

    Links are followed, but not round and round. Names that begin with a dot, and macOS's `__MACOSX`
    folders, are no pictures.

    skipped: how many files of each extension are no pictures that are read.
    ignored: the folders that were not entered.

    `doubles` gets the pictures, by their whole paths.
    """

    def __init__(self, doubles: Doubles | None = None):
        self.skipped: collections.Counter[str] = collections.Counter()
        self.ignored: list[str] = []
        self._doubles = Doubles() if doubles is None else doubles
        self._examples: dict[str, list[str]] = {}  # of the kinds that an extension does not name

    def skip(self, kind: str, path: str | os.PathLike) -> None:
        """Counts the file `path` as skipped; `say` names the first few of this kind."""
        self.skipped[kind] += 1
        self._examples.setdefault(kind, []).append(os.fspath(path))
        del self._examples[kind][_EXAMPLES:]

    def pictures(self, root: str | os.PathLike) -> dict[str, int]:
        """{path: bytes} of the pictures below `root`; paths from there, with forward slashes.

        Unsorted. -1 bytes for a dangling link, which counts as a record that is broken.
        """
        root = os.fspath(root)
        found: dict[str, int] = {}
        seen: set[str] = set()
        unreadable = self.ignored

        def note(error):
            unreadable.append(os.fspath(error.filename))

        for parent, folders, names in os.walk(root, onerror=note, followlinks=True):
            seen.add(os.path.realpath(parent))
            entered = []
            for name in folders:
                path = os.path.join(parent, name)
                if is_hidden(name):
                    self.ignored.append(path)
                elif os.path.realpath(path) not in seen:
                    entered.append(name)
            folders[:] = entered
            for name in names:
                size = self.size_of_picture(parent, name)
                if size is not None:
                    path = os.path.relpath(os.path.join(parent, name), root)
                    found[path.replace(os.sep, "/")] = size
        return found

    def size_of_picture(self, parent: str | os.PathLike, name: str) -> int | None:
        """Bytes of the picture `name` in `parent`, -1 for a dangling link.

        None if the file is no picture; it then counts as skipped.
        """
        extension, path = os.path.splitext(name)[1].lower(), os.path.join(parent, name)
        if name.startswith("."):
            self.skipped["hidden"] += 1
            return None
        if not extension:
            self.skip("without extension", path)
            return None
        if extension not in EXTENSIONS:
            self.skipped[shown(extension)] += 1
            return None
        size, identity = look_up(path)
        if size is None:
            self.skip(f"{extension} that is no file", path)
        else:
            self._doubles.add(path, identity)
        return size

    def say(self, root: str | os.PathLike) -> None:
        """Warns, once a process, of all that was skipped below `root`."""
        say_ignored(root, self.ignored)
        if self.skipped:
            counts = (
                f"{n:,} {kind}{self._say_examples(root, kind)}"
                for kind, n in sorted(self.skipped.items())
            )
            warn_once(
                f"{shown(os.fspath(root))}: skipped {', '.join(counts)}; pictures are files "
                f"ending in {', '.join(EXTENSIONS)}: convert the others"
            )

    def _say_examples(self, root: str | os.PathLike, kind: str) -> str:
        """The first few files of a kind, in brackets; "" for a kind that its extension names."""
        names = [shown(os.path.relpath(path, root)) for path in self._examples.get(kind, ())]
        names += ["..."] * (self.skipped[kind] > len(names))
        return f" ({', '.join(names)})" if kind in self._examples else ""


def is_hidden(name: str) -> bool:
    """Whether a folder of this name holds files that an operating system adds."""
    return name.startswith(".") or name == "__MACOSX"


def say_ignored(root: str | os.PathLike, folders: Iterable[str]) -> None:
    """Warns, once a process, that `folders` below `root` are not read."""
    names = sorted(shown(os.path.relpath(folder, root)) for folder in folders)
    if names:
        warn_once(f"{shown(os.fspath(root))}: ignored these folders: {', '.join(names)}")


def warn_once(text: str) -> None:
    """Logs a warning unless this process has said it."""
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)
