"""Publishes a model on the Hugging Face Hub: weights, preprocessing, receipt, recipe, model card.

huggingface_hub sends the files and reads the token, as base/hub.py says. Large files that a broken
upload has sent are not sent again by the next one.
"""

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from etils import epath
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, constants, errors
from huggingface_hub.utils import validate_repo_id

from vit_jax.base import hub
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.base.files import cache_folder
from vit_jax.config.base import flatten
from vit_jax.config.stored import StoredConfig, read_stored
from vit_jax.data import tokenizers
from vit_jax.transfer import FORMATS
from vit_jax.transfer.export import export
from vit_jax.transfer.model_zoo import repository_of
from vit_jax.transfer.pretrained import Pretrained
from vit_jax.transfer.workdir import workdir_of

# Files of an earlier push that would be read in place of the new ones, or beside them.
_OLD = ["*.safetensors", "*.safetensors.index.json", "preprocessor_config.json", "recipe.json"]
_LIBRARIES = {"hf": "transformers", "hf_pair": "transformers", "timm": "timm"}
_LONG = (*tokenizers.FILES, "model.safetensors.index.json")  # not shown
_VIT, _OWN_SHAPES = "2010.11929", "2502.14786"  # at arXiv
_METRICS = {"top1": "accuracy", "accuracy": "accuracy"}  # ours: the Hub's, where it has one
_SHOWN = (  # keys of the recipe in the card
    "model.name", "init_from", "objective.name", "data.name", "data.split", "data.ops",
    "data.max_tokens", "duration", "global_batch_size", "loss.name", "optimizer.name",
    "optimizer.peak_lr", "optimizer.weight_decay", "schedule.name", "schedule.warmup", "seed",
)  # fmt: skip


def push(
    pretrained: Pretrained,
    repository: str,
    format: str,
    *,
    revision: str | None = None,
    pull_request: bool = False,
    license: str | None = None,
    dry_run: bool = False,
    max_shard_size: str | None = None,
) -> dict[str, Any]:
    """Send a model to a repository of the Hub, which is made if there is none.

    Args:
      pretrained: the model, from `read_pretrained`.
      repository: OWNER/NAME.
      format: of the weights, one that is written as a folder.
      revision: a branch, made if there is none; None: the default branch.
      pull_request: open a pull request instead.
      license: the Hub's identifier, such as apache-2.0; None: the source's, if the Hub has
        the source and its licence.
      dry_run: send nothing.
      max_shard_size: as in `export`.

    Returns:
      {"repository", "files": {name: bytes}, "texts": {name: content}}, and {"commit", "address"} of
      what was sent. README.md among the texts is the card.

    Raises:
      InputError: if the format cannot hold the model, or the Hub refuses.
      RuntimeError: if the exported files compute something else.
    """
    _check(repository, format, revision, pull_request)
    hub.be_quiet()
    room = cache_folder("push")  # on a disk: the temporary folder may be memory
    room.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=room) as work:
        folder = epath.Path(work) / repository.partition("/")[2]
        receipt = export(pretrained, folder, format, max_shard_size=max_shard_size)
        recipe, figures = _files_of_run(pretrained)
        for file in figures:
            file.copy(folder / file.name)
        if recipe:
            (folder / "recipe.json").write_text(recipe.to_json())
        card = folder / "README.md"
        licence = {"license": license} if license else _licence_of(pretrained)
        data = _metadata(receipt, repository, format, licence, pretrained)
        sources = sys.modules[type(pretrained.model).__module__].__doc__ or ""
        papers = re.findall(r"arXiv:(\d{4}\.\d+)", sources) or [_VIT]
        papers += [_OWN_SHAPES] * ("max_tokens" in receipt["preprocessing"])
        shown = [file.name for file in figures], papers
        use = _say_use(folder, format, repository, revision)
        text = card.read_text() + _sections(receipt, recipe, shown, use, licence.get("license"))
        card.write_text(f"---\n{data.to_yaml()}\n---\n\n{text}")
        files = sorted(folder.iterdir())
        texts = [f for f in files if f.suffix in (".json", ".md") and f.name not in _LONG]
        found = {
            "repository": repository,
            "files": {f.name: f.stat().length for f in files},
            "texts": {f.name: f.read_text() for f in texts},
        }
        if dry_run:
            return found
        message = f"{receipt['model']['family']} from vit_jax"
        return found | _send(folder, repository, message, revision, pull_request)


def _send(
    folder: epath.Path, repository: str, message: str, revision: str | None, pull_request: bool
) -> dict[str, str]:
    """Send the files of `folder`; {"commit", "address"} of what was sent."""
    api = HfApi()
    try:
        ModelCard((folder / "README.md").read_text()).validate()  # asks the Hub
        api.create_repo(repository, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        sent = api.upload_folder(
            repo_id=repository,
            folder_path=str(folder),
            commit_message=message,
            revision=revision,
            create_pr=pull_request or None,
            delete_patterns=_OLD,
        )
    except hub.ERRORS as e:
        raise InputError(f"{repository}: {_describe(e, repository)}") from None
    except ValueError as e:  # of the card
        raise InputError(
            f"{repository}: the Hub refuses the card's metadata ({e}); --license needs one of "
            "its identifiers, such as apache-2.0"
        ) from None
    return {"commit": sent.oid, "address": sent.pr_url or sent.commit_url}


def _check(repository: str, format: str, revision: str | None, pull_request: bool) -> None:
    folders = [name for name, f in FORMATS.items() if f.write and "" in (f.suffixes or ())]
    faults, named = Faults(), repository.count("/") == 1
    try:
        validate_repo_id(repository)
    except errors.HFValidationError:
        named = False
    faults.need(named, f"{repository!r}: needs OWNER/NAME, as in the Hub's addresses")
    said = f"--format={format}: push sends a folder; give {' or '.join(folders)}"
    faults.need(format in folders, said)
    said = f"--revision={revision}: a pull request has a branch of its own; leave out --revision"
    faults.need(not pull_request or revision is None, said)
    collect_faults(faults)


def _files_of_run(pretrained: Pretrained) -> tuple[StoredConfig | None, list[epath.Path]]:
    """The config of a run, and its figures; nothing of other sources."""
    if pretrained.run is None:
        return None, []
    workdir = workdir_of(epath.Path(pretrained.source))
    figures = workdir / "figures"
    return read_stored(workdir), sorted(figures.glob("*.png")) if figures.is_dir() else []


def _begun_from(pretrained: Pretrained) -> str | None:
    """The repository of the Hub that the weights, or those the run began from, come from."""
    run = pretrained.run
    named = repository_of(str(run["config"].get("init_from")) if run else pretrained.source)
    return named and named[0]


def _licence_of(pretrained: Pretrained) -> dict[str, str]:
    """The licence of the card's metadata as the origin of the weights states it; {}: it does not.

    Raises:
      InputError: if the origin is not reached.
    """
    if (origin := _begun_from(pretrained)) is None:
        return {}
    try:
        data = HfApi().model_info(origin).card_data
    except hub.ERRORS as e:
        said = hub.describe(e, origin, "the licence", None)
        raise InputError(f"the licence of {origin}: {said}; or give --license") from None
    names = ("license", "license_name", "license_link")
    return {name: data[name] for name in names if data and data.get(name)}


def _metadata(
    receipt: Mapping[str, Any],
    repository: str,
    format: str,
    licence: Mapping[str, str],
    pretrained: Pretrained,
) -> ModelCardData:
    """The card's metadata; raises ValueError if it is not the Hub's."""
    config = receipt.get("config") or {}
    task = "image-classification" if receipt["model"].get("num_classes") else (
        "zero-shot-image-classification" if "text" in receipt else "image-feature-extraction"
    )  # fmt: skip
    name = str(config.get("data", {}).get("name"))
    results = [
        EvalResult(
            task_type=task,
            dataset_type=data or name,
            dataset_name=data or name,
            dataset_split=split,
            metric_type=_METRICS.get(metric, metric),
            metric_name=f"{of}/{metric}",
            metric_value=found["value"],
        )
        for of, metric, found, data, split in _results(receipt)
        if found["value"] is not None and metric != "num_examples"
    ]
    return ModelCardData(
        base_model=_begun_from(pretrained),
        datasets=[name.removeprefix("hf:")] if name.startswith("hf:") else None,
        eval_results=results or None,
        library_name=_LIBRARIES.get(format, "vit_jax"),
        license=licence.get("license"),
        license_name=licence.get("license_name"),
        license_link=licence.get("license_link"),
        model_name=repository.partition("/")[2],
        pipeline_tag=task,
        tags=["vit_jax", receipt["model"]["family"]],
    )


def _results(
    receipt: Mapping[str, Any],
) -> list[tuple[str, str, dict[str, Any], str | None, str | None]]:
    """(evaluator, metric, result, the evaluator's own data, split) of each result of a run."""
    evals, found = (receipt.get("config") or {}).get("evals", {}), []
    for name, result in receipt.get("results", {}).items():
        of, _, metric = name.partition("/")
        own = evals.get(of, {})
        split = own.get("split") or own.get("test_split")
        split = split and split.removesuffix("?")  # marks an optional split
        found.append((of, metric, result, own.get("data_name"), split))
    return found


def _sections(
    receipt: Mapping[str, Any],
    recipe: StoredConfig | None,
    shown: tuple[list[str], list[str]],
    use: list[str],
    license: str | None,
) -> str:
    """The sections of the card after the receipt's, in Markdown.

    `shown`: the names of the figures, and the numbers of papers at arXiv. `use`: from `_say_use`.
    """
    names, (figures, papers) = receipt["class_names"], shown
    lines = ["", "## Use", *use]
    if names:
        lines += ["", "## Classes", "", ", ".join(names)]
    if recipe:
        lines += ["", "## Recipe", "", "[recipe.json](recipe.json) has all keys.", "",
                  "| key | asked | resolved |", "|---|---|---|"]  # fmt: skip
        asked, resolved = flatten(recipe.asked), flatten(recipe.resolved)
        for key in _SHOWN:
            if resolved.get(key) is not None:  # the Hub takes a bare pipe for the next cell
                cells = (f"`{found.get(key)}`".replace("|", r"\|") for found in (asked, resolved))
                lines.append(f"| {key} | {' | '.join(cells)} |")
    if results := _results(receipt):
        on = ", ".join(sorted({f"{of}: {split}" for of, *_, split in results}))
        lines += ["", f"The results above were measured in training ({on}); `python -m vit_jax.main"
                  f" evaluate --workdir={receipt['source']}` measures them again."]  # fmt: skip
    for name in figures:
        lines += ["", f"![{name.removesuffix('.png')}]({name})"]
    lines += ["", "## Licence", "", license or "Not stated."]
    lines += ["", "## Citation", "", *(f"- https://arxiv.org/abs/{number}" for number in papers)]
    return "\n".join(lines) + "\n"


def _say_use(folder: epath.Path, format: str, repository: str, revision: str | None) -> list[str]:
    """How vit_jax and the format's library load the model, in Markdown."""
    address = repository + (f"@{revision}" if revision else "")
    calls = {"vit_jax": f'model, variables = vit_jax.load_pretrained("hf:{address}")'}
    library, index = _LIBRARIES.get(format), folder / "model.safetensors.index.json"
    stated = json.loads((folder / "config.json").read_text()) if library else {}
    if library == "timm" and not index.exists() and "eps" not in stated.get("model_args", {}):
        calls["timm"] = f'model = timm.create_model("hf-hub:{address}", pretrained=True)'
    elif library == "transformers":
        of = f', revision="{revision}"' if revision else ""
        [name] = stated["architectures"]
        calls["transformers"] = f'model = transformers.{name}.from_pretrained("{repository}"{of})'
    return [line for name, call in calls.items()
            for line in ("", "```python", f"import {name}", "", call, "```")]  # fmt: skip


def _describe(error: Exception, repository: str) -> str:
    """The cause and the remedy."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError):
        return (
            f"{constants.ENDPOINT} lets nobody write there without a token that may write; set "
            "HF_TOKEN, or run `hf auth login`"
        )
    return hub.describe(error, repository, "the files", None).replace("fetched", "sent")
