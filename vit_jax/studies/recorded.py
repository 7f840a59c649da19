"""What the members of a study recorded, where it makes their results less comparable."""

import json
from collections.abc import Iterable

from etils import epath

from vit_jax import config as config_lib
from vit_jax.config import stored as stored_config


def find_differences(workdir: epath.Path, names: Iterable[str]) -> list[str]:
    """Warnings for settings that differ between the members `names` of the study in `workdir`."""
    names = list(names)
    return _of_older_members(workdir, names) + _of_microbatches(workdir, names)


def _of_older_members(workdir: epath.Path, names: list[str]) -> list[str]:
    """Warnings for keys whose value for older runs differs between members."""
    kept = {name: stored_config.kept_values(workdir / name) for name in names}
    lines = []
    for key in config_lib.IN_OLDER_RUNS:
        values = {name: values[key] for name, values in kept.items() if values}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{value!r} in {name}" for name, value in values.items())
            lines.append(f"{key} differs, so results may not be comparable: {shown}")
    return lines


def _of_microbatches(workdir: epath.Path, names: list[str]) -> list[str]:
    """Warnings where members of one model and batch size recorded different microbatches."""
    alike: dict[str, dict[str, int]] = {}
    for name in names:
        path = workdir / name / "config.json"
        if path.exists():
            c = json.loads(path.read_text())
            kind = json.dumps([c["model"], c["global_batch_size"], c["data"]["image_size"]])
            alike.setdefault(kind, {})[name] = c["optimizer"].get("accum_steps", 1)
    return [
        "optimizer.accum_steps differs, as members ran on different devices, so their results "
        f"differ by rounding: {', '.join(f'{value} in {name}' for name, value in values.items())}; "
        "set it to have one number"
        for values in alike.values()
        if len({*values.values()}) > 1
    ]
