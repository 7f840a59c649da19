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
    """The folders in `parent` that are not hidden, sorted by name.

    Leaves out links to `parent` or to a folder that holds it: they would double every picture.
    """
    above = {parent.resolve(), *parent.resolve().parents}
    return sorted(
        p
        for p in parent.iterdir()
        if p.is_dir() and not is_hidden(p.name) and not (p.is_symlink() and p.resolve() in above)
    )


def find_dataset_below(root: pathlib.Path) -> pathlib.Path | None:
    """The folder in `root` that holds train/, if there is one such folder; else None."""
    found = [path for path in class_like_folders(root) if _holds_train(path)]
    return found[0] if len(found) == 1 else None


def _holds_train(path: pathlib.Path) -> bool:
    """Whether a sub-folder of `path` is a training split; False if `path` cannot be listed."""
    try:
        return any(f.name.lower() in SPLIT_NAMES["train"] for f in class_like_folders(path))
    except OSError:  # such as the lost+found of a disk
        return False


def describe_contents(root: pathlib.Path, remedy: str = "add some") -> str:
    """What `root` holds, and what to do: "found 12 pictures, 1 other file (.txt); add some".

    Where a data set lies below `root`, its folder is the remedy instead of `remedy`.
    """
    below = find_dataset_below(root)
    if below is not None:
        # data_dir may be a key of data or of an evaluator.
        return f"found {shown(below.name)}/ with train/ in it; set data_dir to {shown(str(below))}"
    folders = [shown(path.name) + "/" for path in class_like_folders(root)]
    extensions = collections.Counter(
        os.path.splitext(entry.name)[1].lower() or "without extension"
        for entry in os.scandir(root)
        if not entry.name.startswith(".") and not os.path.isdir(entry.path)
    )
    num_pictures = sum(extensions.pop(extension, 0) for extension in EXTENSIONS)
    others = [name for name, _ in extensions.most_common(_SHOWN)]
    parts = [_count(len(folders), "folder", folders[:_SHOWN])] if folders else []
    parts += [_count(num_pictures, "picture", [])] if num_pictures else []
    parts += [_count(extensions.total(), "other file", others)] if others else []
    return f"found {', '.join(parts) or 'nothing in it'}; {remedy}"


def _count(number: int, what: str, names: list[str]) -> str:
    shown_names = f" ({', '.join(names)}{', ...' if number > len(names) else ''})" if names else ""
    return f"{number:,} {what}{'s' if number > 1 else ''}{shown_names}"
