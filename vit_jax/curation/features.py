"""Features of a data set in the folder that `predict --features=DIR` writes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import IO

import numpy as np
from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.base.files import read_json
from vit_jax.inference.parts import Parts
from vit_jax.models.text import unit


@dataclasses.dataclass(frozen=True)
class Features:
    """Features of each record of a data set.

    parts: their files.
    fingerprint: of the data.
    model: digest of the weights that computed them.
    """

    parts: Parts
    fingerprint: str
    model: str

    @classmethod
    def open(cls, folder: str | os.PathLike, flag: str) -> Features:
        """The features in `folder`.

        Raises: InputError naming `flag` if it has none, or not yet all.
        """
        path = epath.Path(folder)
        facts, summary = read_json(path / "predictions.json"), read_json(path / "summary.json")
        if not facts or facts["what"] != "features" or not summary:
            raise InputError(
                f"{flag}={folder}: has no features of all records; write them by "
                f"vit_jax predict --init_from=SOURCE --data=NAME:SPLIT --features={folder}"
            )
        parts = Parts(path, summary["rows"], facts["records_of_part"], ".npy")
        return cls(parts, facts["fingerprint"], facts["weights"])

    def __len__(self) -> int:
        return self.parts.num_examples

    def read(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids (n,), features (n, D)) of consecutive records; unreadable ones are left out.

        Features are float32, each of length 1.
        """
        for part in range(len(self.parts)):
            opened: IO[bytes] = self.parts.path(part).open("rb")
            with opened as file:
                x_ND = np.load(file).astype(np.float32)
            known = ~np.isnan(x_ND).any(axis=1)
            yield self.parts.ids(part)[known], unit(x_ND[known])
