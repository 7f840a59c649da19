"""Train, evaluate and predict from Python; the commands of the same names do the same."""

import copy
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath
from ml_collections import ConfigDict

from vit_jax import files
from vit_jax.config import REQUIRED, REQUIRED_TO_EVALUATE, with_values
from vit_jax.config import stored as stored_config
from vit_jax.config import text as config_text
from vit_jax.errors import Faults, InputError, nearest
from vit_jax.run.validation import validate

if TYPE_CHECKING:
    import numpy as np

    from vit_jax.transfer import Pretrained

# {output of `predict`: what `inference.predict.outputs` calls it}.
_OUTPUTS = {
    "classes": "probabilities",
    "probabilities": "probabilities",
    "logits": "logits",
    "features": "pooled",
    "dense": "patches",
    "attention": "attention",
}
_OF_LAYERS = ("features", "dense", "attention")
_BATCH_SIZE = 64


def load_config(
    config: ConfigDict | str | os.PathLike, overrides: Mapping[str, Any] | None = None
) -> ConfigDict:
    """Load a config, or copy one, and set some of its keys.

        config = vit_jax.load_config("quickstart:debug", {"duration": "20 steps"})
        config.optimizer.peak_lr = 3e-3

    Args:
      config: as --config: the name of a shipped config or the path of a file, and its words; or a
        config, which is copied.
      overrides: {key: value}, e.g. {"model.depth": 6}.

    Raises:
      InputError: lists every key that does not exist and every value of a wrong type.
    """
    if isinstance(config, ConfigDict):
        config = copy.deepcopy(config)  # keeps the types of keys that are None
    else:
        config = config_text.load_config(os.fspath(config))
    pairs = [(key, _as_text(value)) for key, value in (overrides or {}).items()]
    faults = config_text.apply_overrides(config, pairs)
    if faults:
        raise InputError(*faults, where="overrides")
    return config


def _as_text(value: Any) -> str:
    """`value` as it is written on the command line."""
    return repr(tuple(value)) if isinstance(value, (tuple, list)) else str(value)


def train(
    config: ConfigDict | str | os.PathLike | None,
    workdir: epath.PathLike,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train as `config` describes, continuing the run in `workdir` if there is one.

        summary = vit_jax.train("quickstart", "runs/quickstart", {"duration": "200 steps"})
        summary["test/top1"]

    Runs the same loop as the command: it prints progress and logs to the logger "vit_jax".

    Args:
      config, overrides: as in `load_config`; None: what was asked for at the last start of the run
        in `workdir`.
      workdir: folder for everything that the run writes.

    Returns:
      The summary, as in `workdir/summary.json`.

    Raises:
      InputError: a ValueError that lists all faults; nothing has been written.
      NonFiniteError, CorruptDataError: see `run.train.train_and_evaluate`.
    """
    from vit_jax.devices.mesh import start_backend
    from vit_jax.planning.search import choose_layout
    from vit_jax.run.train import train_and_evaluate

    if config is None:
        config = stored_config.read_asked(files.absolute(workdir))
    config = load_config(config, overrides)
    validate(config, Faults(), "config", REQUIRED)
    start_backend(config.mesh.platform)
    return train_and_evaluate(config, workdir, choose_layout=choose_layout)


def evaluate(
    source: epath.PathLike,
    config: ConfigDict | str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Evaluate a run, or any model; writes nothing.

        vit_jax.evaluate("runs/mine")                       # by its own config
        vit_jax.evaluate("ViT-B/16@augreg", "evaluate:knn,cifar10", {"data.data_dir": DIR})

    Args:
      source: the workdir of a run; with `config`, any source of `load_pretrained`.
      config: the evaluators and their data; None: the run's own.
      overrides: as in `load_config`.

    Returns:
      {"test/top1": ..., ...}; for a run also its "step".

    Raises:
      InputError: a ValueError that lists all faults.
    """
    from vit_jax import transfer
    from vit_jax.devices.mesh import start_backend
    from vit_jax.inference import evaluate as evaluation

    if config is None:
        pairs = [(key, _as_text(value)) for key, value in (overrides or {}).items()]
        found = config_of_run(source, pairs)
        start_backend(found.mesh.platform)
        return evaluation.evaluate(found, files.absolute(source))
    config = load_config(config, overrides)
    validate(config, Faults(), "config", REQUIRED_TO_EVALUATE)
    check_evaluates_any(config, "config")
    start_backend(config.mesh.platform)
    pretrained = transfer.read_pretrained(source)
    return evaluation.evaluate_pretrained(config, pretrained)


def config_of_run(workdir: epath.PathLike, overrides: Sequence[tuple[str, str]]) -> ConfigDict:
    """The config of the run in `workdir` with `overrides` applied: (key, text), validated.

    A mesh that the run's devices decided is open again, as these devices may be others.

    Raises:
      InputError: if there is no run, or it has no evaluators.
    """
    workdir = files.absolute(workdir)
    stored = stored_config.read_stored(workdir)
    chosen = [key for key, by in stored.decided_by.items() if by == "devices"]
    config = with_values(stored.resolved, {key: None for key in chosen if key.startswith("mesh.")})
    faults = config_text.apply_overrides(config, overrides)
    validate(config, faults, f"{workdir}/config.json")
    if not config.evals:
        raise InputError(f"--workdir={workdir}: its config lists no evaluators (evals)")
    return config


def check_evaluates_any(config: ConfigDict, where: str) -> None:
    """Raise InputError, naming `where`, unless `config` can evaluate a model from any source."""
    if config.model.name is not None:
        raise InputError(f"model.name={config.model.name!r}: --init_from sets it; leave it out")
    if not config.evals:
        raise InputError(f"{where}: lists no evaluators (evals)")


def predict(
    images: Any,
    source: "epath.PathLike | Pretrained",
    *,
    output: str = "classes",
    layer: int | None = None,
    top: int = 5,
    image_size: int | Sequence[int] | None = None,
    batch_size: int | None = None,
) -> "list[dict[str, Any]] | np.ndarray":
    """Classify images, or compute features of any layer.

        vit_jax.predict("cat.jpg", "runs/mine")[0]["classes"][0]["name"]
        model = vit_jax.read_pretrained("ViT-B/16@augreg")      # read once, use often
        x = vit_jax.predict([picture, array], model, output="dense", layer=6)   # (2, 14, 14, 768)

    Args:
      images: one image or a list: paths of files and folders, Pillow images, and arrays of uint8
        pixels, (H, W), (H, W, C) or (N, H, W, C). Sizes may differ: images are resized and cropped
        as the model's evaluation does.
      source: a source of `load_pretrained`, or a model from `read_pretrained`.
      output: "classes": for each image {"file", "classes": [{"name", "index", "probability"}]};
        "probabilities" or "logits": (N, C); "features": (N, D), one vector per image; "dense":
        (N, rows, columns, D), one vector per patch; "attention": (N, H, T, T), the weights that
        each of T tokens (rows) gives to each token, prefix tokens first.
      layer: for the last three: the layer, counted from 0, negative from the end. None: the
        model's final output, or the last layer's attention. A layer's output is not yet
        normalised; its "features" are the class token if the model classifies that, else the mean
        of the patches.
      top: number of classes of "classes".
      image_size: another size than the model's own; positions are resampled.
      batch_size: images at once, over all devices; None: up to 64.

    Returns:
      A list for "classes", else float32 arrays. An image that cannot be read has the key "error"
      instead of "classes", or NaN in an array, and is named in a warning.

    Raises:
      InputError: a ValueError; names the argument.
    """
    _check_asked(output, layer, top)
    import jax
    import numpy as np

    from vit_jax.data.images.given import open_images
    from vit_jax.inference import predict as prediction

    pretrained = _open_model(source, image_size, output)
    spec = pretrained.spec
    found = open_images(images, spec.exif is not False, spec.channels)
    if batch_size is None:
        ways, needed = jax.device_count(), min(found.num_examples, _BATCH_SIZE)
        batch_size = -(-needed // ways) * ways
    how: dict[str, Any] = {"batch_size": batch_size, "progress": False}
    if output == "classes":
        return list(prediction.predict(pretrained, found, top=top, **how))
    parts = prediction.outputs(pretrained, found, what=_OUTPUTS[output], layer=layer, **how)
    return np.concatenate([np.where(batch["mask"] > 0, x.T, np.nan).T for x, batch in parts])


def _check_asked(output: str, layer: int | None, top: int) -> None:
    """Raise InputError, naming the argument, if `predict` cannot give this."""
    if output not in _OUTPUTS:
        raise InputError(f"output={output!r}: {nearest(output, list(_OUTPUTS))}")
    if layer is not None and output not in _OF_LAYERS:
        raise InputError(f"layer={layer}: goes with output={' or '.join(_OF_LAYERS)}; leave it out")
    if top < 1:
        raise InputError(f"top={top}: needs a positive number")


def _open_model(
    source: "epath.PathLike | Pretrained", image_size: int | Sequence[int] | None, output: str
) -> "Pretrained":
    """The model of `source` at `image_size`; raises InputError if it cannot give `output`."""
    from vit_jax import transfer

    found = source if isinstance(source, transfer.Pretrained) else transfer.read_pretrained(source)
    if image_size is not None:
        found = transfer.with_image_size(found, image_size)
    if found.spec.image_size is None:
        raise InputError(f"image_size=None: {found.source} takes images of any size; choose one")
    if found.model.num_classes is None and output not in _OF_LAYERS:
        raise InputError(
            f"output={output!r}: {found.source} has no classes; choose {', '.join(_OF_LAYERS)}"
        )
    return found
