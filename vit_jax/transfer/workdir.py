"""Models from the workdirs of this project."""

import jax
import numpy as np
from etils import epath

from vit_jax import checkpoint, tree
from vit_jax.config import InputError, image_hw, model_fields, read_config
from vit_jax.models import create_model
from vit_jax.transfer.rules import Pretrained, abstract_params, unstack_layers


def recognises(path: epath.Path) -> bool:
    """Whether `path` is the workdir of a run."""
    return (path / "config.json").exists() and (path / "checkpoints").exists()


def read(path: epath.Path) -> Pretrained:
    """The newest valid checkpoint of the workdir `path`; of the running average where it has one.

    Raises:
      InputError: if there is none.
    """
    config = read_config(path)
    model = create_model(
        config.model.name,
        config.data.num_classes,
        image_hw(config.data.image_size),
        **model_fields(config),
    )
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    params = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
        for name, leaf in abstract_params(model).items()
    }
    weights = "params" if config.optimizer.ema_decay is None else "ema"
    target = {weights: tree.unflatten_names(params)}
    restored = checkpoint.restore_newest(path / "checkpoints", target, partial=True)
    if restored is None:
        raise InputError(f"init_from={str(path)!r}: no checkpoint there yet")
    params = jax.tree.map(np.asarray, restored[0][weights])
    if model.scan:
        params = unstack_layers(params)
    return Pretrained(
        str(path), model.clone(scan=False), tree.flatten_names(params), resize="antialiased"
    )
