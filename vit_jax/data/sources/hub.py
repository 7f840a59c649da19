"""Data sets of the Hugging Face Hub: `hf:OWNER/NAME`, `hf:OWNER/NAME/CONFIG`, with `@REVISION`.

The Parquet files of the splits that a run reads are fetched into the cache of huggingface_hub.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import huggingface_hub
from etils import epath

from vit_jax.base import hub
from vit_jax.base.errors import InputError
from vit_jax.data.contract import Request
from vit_jax.data.images.files import split_of
from vit_jax.data.shard_files import Files, sort_files, take_asked
from vit_jax.data.sources.tables import Parquet

T = TypeVar("T")

_NAME = re.compile(r"hf:([^/@]+/[^/@]+)(?:/([^@]+))?(?:@(.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class _Repository(NamedTuple):
    """The data set called `hf:OWNER/NAME/CONFIG@REVISION`."""

    name: str
    repo_id: str
    config: str | None
    revision: str | None

    @classmethod
    def named(cls, name: str) -> _Repository:
        found = _NAME.fullmatch(name)
        if found is None:
            needed = "hf:OWNER/NAME, hf:OWNER/NAME/CONFIG, or one of them with @REVISION"
            raise InputError(f"data.name={name!r}; needed: {needed}")
        return cls(name, *found.groups())

    def ask(self, question: Callable[..., T], **details: Any) -> T:
        """The answer of a function of huggingface_hub about the revision.

        Raises: InputError if there is no such repository or revision, or it cannot be read.
        """
        hub.be_quiet()
        try:
            return question(self.repo_id, repo_type="dataset", revision=self.revision, **details)
        except hub.ERRORS as e:
            at = f"datasets/{self.repo_id}"
            fault = hub.describe(e, at, "files of it", self.revision)
            raise InputError(f"data.name={self.name!r}: {fault}") from None

    def fetch(self, files: Sequence[str], **details: Any) -> epath.Path:
        """The folder of the commit in the cache, with these files."""
        patterns = [glob.escape(file) for file in files]
        download = huggingface_hub.snapshot_download
        return epath.Path(self.ask(download, allow_patterns=patterns, **details))

    def commit(self) -> str:
        """Of the revision; from the cache if the Hub is not reached."""
        if _COMMIT.fullmatch(self.revision or ""):
            return self.revision or ""
        try:
            return self.ask(huggingface_hub.HfApi().repo_info).sha or ""
        except InputError:
            with contextlib.suppress(InputError):
                return self.fetch([], local_files_only=True).name
            raise

    def files(self) -> list[str]:
        """All files of the commit; those in the cache if the Hub is not reached."""
        try:
            return self.ask(huggingface_hub.HfApi().list_repo_files)
        except InputError:
            with contextlib.suppress(InputError):
                folder = self.fetch([], local_files_only=True)
                return glob.glob("**/*.parquet", root_dir=folder, recursive=True)
            raise

    def of_splits(self) -> Files:
        """The Parquet files of the config, by their paths in the repository.

        Raises: InputError if there are none, or several configs.
        """
        by_config: dict[str, list[str]] = {}
        for file in self.files():
            *folders, name = file.split("/")
            if name.endswith(".parquet"):
                config = "/".join(folder for folder in folders if split_of(folder) is None)
                by_config.setdefault(config, []).append(file)
        where = f"data.name={self.name!r}"
        if not by_config:
            raise InputError(
                f"{where}: has no Parquet files; take the Hub's own conversion, "
                f"hf:{self.repo_id}@refs/convert/parquet, or convert it by python -c "
                f"\"import datasets; datasets.load_dataset('{self.repo_id}').save_to_disk('DIR')\" "
                "and set --config.data.name=arrow --config.data.data_dir=DIR"
            )
        default = "data" if "data" in by_config else [*by_config][-1] * (len(by_config) == 1)
        config = default if self.config is None else self.config
        if config not in by_config:
            known = ", ".join(f"hf:{self.repo_id}/{config}" for config in sorted(by_config))
            raise InputError(f"{where}: needs one of its configs: {known}")
        paths = {path: epath.Path(path) for path in by_config[config]}
        return sort_files(epath.Path(self.repo_id), paths)


class Hub(Parquet):
    """The Parquet files of a data set of the Hugging Face Hub, `hf:OWNER/NAME`."""

    @classmethod
    def settle(cls, name: str) -> str:
        """`name` with the commit of its revision, which a run keeps."""
        return f"{name.partition('@')[0]}@{_Repository.named(name).commit()}"

    @classmethod
    def splits(cls, name: str, data_dir: str | None) -> Sequence[str]:
        return [*_Repository.named(name).of_splits().by_split, "all"]

    def find(self, request: Request) -> Files:
        repository = _Repository.named(request.name)
        found = take_asked(repository.of_splits(), request.split)
        root = repository.fetch([*map(os.fspath, found.paths)])
        return Files(root, {s: [root / path for path in of] for s, of in found.by_split.items()})
