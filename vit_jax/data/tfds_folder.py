"""Finds the folder of a prepared TFDS data set, or says how to get the data set."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence

from etils import epath

from vit_jax.data.host_tf import tfds
from vit_jax.errors import InputError

_NAME = re.compile(r"(?P<name>\w+)(/(?P<config>[\w.-]+))?(:(?P<version>\d+\.\d+\.\d+))?")


def prepared_folder(
    name: str, data_dir: str | None, other_sources: Sequence[str] = ()
) -> epath.Path:
    """The folder of the data set's version: data_dir/name[/config]/version.

    Raises: InputError if it does not exist; the message says how to get the data set.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise InputError(f"data.name={name!r}; needed: a name such as 'cifar10', 'cifar10:3.0.2'")
    root = epath.Path(os.path.expanduser(data_dir or tfds.core.constants.DATA_DIR))
    parent = root / match["name"] / (match["config"] or "")
    found = sorted(p.name for p in parent.iterdir() if p.is_dir()) if parent.exists() else []
    versions = [v for v in found if re.fullmatch(r"\d+\.\d+\.\d+", v)]
    newest = max(versions, key=lambda v: [int(n) for n in v.split(".")], default="")
    folder = parent / (match["version"] or newest)
    if (folder / "dataset_info.json").exists() and (folder / "features.json").exists():
        return folder

    looked_for = folder / "features.json" if folder != parent else parent / "VERSION/features.json"
    there = f" (there: {', '.join(found)})" if found else ""
    raise InputError(
        f"data.name={name!r}: no prepared data set, {looked_for} or the dataset_info.json next to "
        f"it is missing{there}; {_how_to_get(match['name'], name, root, other_sources)}"
    )


def _how_to_get(catalogue_name: str, name: str, root: epath.Path, other_sources) -> str:
    catalogue = tfds.list_builders(with_community_datasets=False)
    if catalogue_name not in catalogue:
        known = [*other_sources, *catalogue]
        close = difflib.get_close_matches(catalogue_name, known, n=1, cutoff=0.7)
        meant = f"did you mean {close[0]!r}? Otherwise " if close else ""
        meant += "prepare it as docs/how_to/datasets.md shows, or "
        return f"{meant}set data.data_dir to the folder that holds {catalogue_name}/"
    manual = tfds.builder_cls(catalogue_name).MANUAL_DOWNLOAD_INSTRUCTIONS
    steps = (
        'prepare it with: python -c "import tensorflow_datasets as tfds; '
        f'tfds.builder({name!r}, data_dir={str(root)!r}).download_and_prepare()"'
    )
    if manual:
        steps += ", after placing the files that TFDS cannot download in "
        steps += f"{root / 'downloads/manual'}. "
        steps += f"TFDS says: {' '.join(manual.split())}"
    return f"{steps}; or set data.data_dir to the folder that holds {catalogue_name}/"
