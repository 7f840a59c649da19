"""What the members of a study recorded, where it makes their results less comparable."""

import json
from collections.abc import Iterable

from etils import epath


def find_differences(workdir: epath.Path, names: Iterable[str]) -> list[str]:
    """Warnings where members of one model and batch size recorded different microbatches."""
    alike: dict[str, dict[str, int]] = {}
    for name in names:
        path = workdir / name / "config.json"
        if path.exists():
            c = json.loads(path.read_text())["resolved"]
            kind = json.dumps([c["model"], c["global_batch_size"], c["data"]["image_size"]])
            alike.setdefault(kind, {})[name] = c["optimizer"]["accum_steps"]
    return [
        "optimizer.accum_steps differs, as members ran on different devices, so their results "
        f"differ by rounding: {', '.join(f'{value} in {name}' for name, value in values.items())}; "
        "set it to have one number"
        for values in alike.values()
        if len({*values.values()}) > 1
    ]
