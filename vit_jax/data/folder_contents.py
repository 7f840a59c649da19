"""What a folder holds, in words, for errors about one that is no image folder."""

import collections
import os
import pathlib

from vit_jax.data.pictures import EXTENSIONS, is_hidden, shown

# Split -> the names, in small letters, that its folder may have.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
_SHOWN = 4  # names, or extensions, in a message


def class_like_folders(parent: pathlib.Path) -> list[pathlib.Path]:
    """The folders in `parent` that are not hidden, sorted by name."""
    return sorted(p for p in parent.iterdir() if p.is_dir() and not is_hidden(p.name))


def find_dataset_below(root: pathlib.Path) -> pathlib.Path | None:
    """The folder in `root` that holds train/, if there is one such folder; else None."""
    found = [
        path
        for path in class_like_folders(root)
        if any(below.name.lower() in SPLIT_NAMES["train"] for below in class_like_folders(path))
    ]
    return found[0] if len(found) == 1 else None


def describe_contents(root: pathlib.Path) -> str:
    """What `root` holds: "found 12 pictures, 1 other file (.txt)"; where a data set lies below."""
    below = find_dataset_below(root)
    if below is not None:
        return (
            f"found {shown(below.name)}/ with train/ in it; give "
            f"--config.data.data_dir={shown(str(below))}"
        )
    folders = [shown(path.name) + "/" for path in class_like_folders(root)]
    extensions = collections.Counter(
        os.path.splitext(entry.name)[1].lower() or "without extension"
        for entry in os.scandir(root)
        if not entry.name.startswith(".") and not entry.is_dir()
    )
    num_pictures = sum(extensions.pop(extension, 0) for extension in EXTENSIONS)
    others = [name for name, _ in extensions.most_common(_SHOWN)]
    parts = [_count(len(folders), "folder", folders[:_SHOWN])] if folders else []
    parts += [_count(num_pictures, "picture", [])] if num_pictures else []
    parts += [_count(extensions.total(), "other file", others)] if others else []
    return f"found {', '.join(parts)}" if parts else "found nothing in it"


def _count(number: int, what: str, names: list[str]) -> str:
    shown_names = f" ({', '.join(names)}{', ...' if number > len(names) else ''})" if names else ""
    return f"{number:,} {what}{'s' if number > 1 else ''}{shown_names}"
