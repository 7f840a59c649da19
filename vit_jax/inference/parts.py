"""The outputs of a model for many images, in parts: divided over processes, resumed after a kill.

    FOLDER/NAME.json        which outputs, images and model: the manifest
    FOLDER/part_00000.END   of the first records, and so on

A part is written whole, so the same command goes on with those that are missing, in any number of
processes that share the folder. Each process computes on its own devices and waits for no other.
"""

import dataclasses
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.base.files import read_json, write_whole
from vit_jax.checkpoints.checksums import hash_params
from vit_jax.data import Source
from vit_jax.inference.outputs import outputs
from vit_jax.job import processes, watchdog
from vit_jax.models.contract import field_names
from vit_jax.models.fields import check_fields, field_defaults
from vit_jax.transfer.pretrained import Pretrained, preparation

logger = logging.getLogger("vit_jax")

Rows = Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]  # as `outputs` gives them

_SIZE = "records_of_part"
_SINCE_0_2_0 = ("pixels", "fields", "reading")  # which the manifests of version 0.2.0 lack
_LEAST = 1024  # records of a part
_PARTS = 1000  # at most, of more records
_WAIT_S = 7 * 24 * 3600.0  # for processes whose parts take longer; JAX finds those that have ended


@dataclasses.dataclass(frozen=True)
class Parts:
    """Records in parts of `size` each, the last one perhaps smaller; `suffix`: of their files."""

    folder: epath.Path
    num_examples: int
    size: int
    suffix: str

    def __len__(self) -> int:
        return math.ceil(self.num_examples / self.size)

    def path(self, part: int) -> epath.Path:
        return self.folder / f"part_{part:05}{self.suffix}"

    def ids(self, part: int) -> np.ndarray:
        """The records of a part, int64."""
        first = part * self.size
        return np.arange(first, min(first + self.size, self.num_examples))


def facts_of(pretrained: Pretrained, source: Source) -> dict[str, Any]:
    """The facts of a manifest that decide the outputs for the records of `source`."""
    named = {"fingerprint": source.fingerprint, "model": pretrained.source}
    return named | facts_of_model(pretrained, source.image_shape)


def facts_of_model(
    pretrained: Pretrained, image_shape: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """The facts that decide a model's outputs for an image; they are the same in every process.

    `image_shape`: as in `preparation`.
    """
    spec, family = pretrained.spec, type(pretrained.model)
    fields = {name: getattr(pretrained.model, name) for name in field_names(family)}
    fields, usual = check_fields(family, fields, pretrained.source), field_defaults(family)
    fields = {name: fields[name] for name in fields if fields[name] != usual.get(name, ...)}
    ops, rule = preparation(spec, image_shape)
    facts = {
        "weights": hash_params({**pretrained.params, **pretrained.model_state}),
        "ops": ops if rule is None else f"{ops}, {rule.most} patches of {rule.patch_size}",
        "pixels": [spec.image_size, spec.mean, spec.std],
        "fields": {name: fields[name] for name in fields if name not in ("ops", "constrain")},
        "reading": spec.reading._asdict(),
    }
    return json.loads(json.dumps(facts, default=str))  # as a manifest holds them


def begin(
    manifest: epath.Path,
    facts: Mapping[str, Any],
    num_examples: int,
    batch_size: int,
    *,
    flag: str,
    suffix: str,
    size: int | None = None,
) -> Parts:
    """Write the manifest if there is none, and divide the records; to be called by all processes.

    Args:
      facts: what must be equal in the manifest of an earlier call.
      batch_size: of the call that writes the manifest, whose parts hold whole batches.
      flag: that names the folder, for errors.
      suffix: of the files of the parts.
      size: of the parts if a manifest states none, as in earlier versions.

    Raises:
      InputError: the folder has the parts of other images or another model, or parts
        without a manifest.
    """
    whole = max(_LEAST, math.ceil(num_examples / _PARTS))
    facts = {**facts, _SIZE: math.ceil(whole / batch_size) * batch_size}

    def agree() -> int:
        if not manifest.exists():
            if foreign := sorted(manifest.parent.glob(f"part_*{suffix}")):
                raise InputError(
                    f"{flag}={manifest.parent}: holds {foreign[0].name}, but no {manifest.name} "
                    f"that says of what; use a new {flag}, or restore that file"
                )
            manifest.parent.mkdir(parents=True, exist_ok=True)
            write_whole(manifest, json.dumps(facts, indent=2) + "\n")
            return facts[_SIZE]
        before = {_SIZE: size, **(read_json(manifest) or {})}
        for key in facts:
            known = before.get(key, facts[key] if key in _SINCE_0_2_0 else None)
            if key != _SIZE and known != facts[key]:
                raise InputError(
                    f"{flag}={manifest.parent}: holds {manifest.stem} with another {key}: "
                    f"{before.get(key)!r}, now {facts[key]!r}; use a new {flag}"
                )
        return before[_SIZE]

    agreed = processes.say_to_all("the manifest", agree, _WAIT_S)
    return Parts(manifest.parent, num_examples, agreed, suffix)


def write_missing(
    pretrained: Pretrained,
    source: Source,
    parts: Parts,
    write: Callable[[epath.Path, np.ndarray, Rows], None],
    **how: Any,
) -> None:
    """Write the missing parts, each process its share; return once all processes have done so.

    Args:
      write: called with the path of a part, the ids of its records, and their outputs; writes the
        file whole and last.
      how: of `outputs`.
    """

    def find() -> list[int]:
        return [part for part in range(len(parts)) if not parts.path(part).exists()]

    missing = processes.say_to_all("the missing parts", find, _WAIT_S)
    own = missing[jax.process_index() :: jax.process_count()]
    logger.info("%s: %d of %d parts are missing", parts.folder, len(missing), len(parts))
    if own:
        ids = np.concatenate([parts.ids(part) for part in own])
        pieces = _pieces(outputs(pretrained, source, record_ids=ids, **how), ids // parts.size)
        for part, found in itertools.groupby(pieces, key=lambda piece: piece[0]):
            write(parts.path(part), parts.ids(part), (piece[1:] for piece in found))
    processes.agree("the end of the parts", {}, _WAIT_S)


def _pieces(rows: Rows, part_of: np.ndarray) -> Iterator[tuple[int, np.ndarray, dict]]:
    """(part, outputs, batch): `rows`, each batch cut where a part ends.

    `part_of`: the part of each record (n,).
    """
    end = 0
    while True:
        with watchdog.phase("evaluation"):  # which each batch begins anew
            found = next(rows, None)
        if found is None:
            return
        x, batch = found
        start, end = end, end + len(x)
        here = part_of[start:end]
        for part in dict.fromkeys(here.tolist()):
            of_part = here == part
            yield part, x[of_part], {key: value[of_part] for key, value in batch.items()}
