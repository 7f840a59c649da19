"""The model of a config in the form that computes a step on a mesh, and in its plain form."""

import logging

import flax.linen as nn
from jax.sharding import Mesh

from vit_jax.base.errors import InputError
from vit_jax.config import sections
from vit_jax.devices.kernels import choose_ops
from vit_jax.devices.sharding import constrain
from vit_jax.models import model_of
from vit_jax.models.block_ops import PLAIN, unconstrained
from vit_jax.models.contract import about, with_known

logger = logging.getLogger("vit_jax")


def make_model(model: sections.Model, data: sections.Data, mesh: Mesh) -> nn.Module:
    """The model of a resolved config, sharded over `mesh`, in the fastest form for it."""
    made = on_mesh(model_of(model, data, data.num_classes), mesh, model.kernels)
    _warn_of_uneven_split(made, mesh)
    return made


def on_mesh(model: nn.Module, mesh: Mesh, kernels: str) -> nn.Module:
    """`model` sharded over `mesh`, in the fastest form for it; `kernels` is the config's."""
    return choose_ops(with_known(model, constrain=constrain), mesh, kernels)


def in_plain_form(model: nn.Module) -> nn.Module:
    """`model` on one device, without kernels; nothing is computed twice."""
    return with_known(model, constrain=unconstrained, ops=PLAIN, remat="none")


def check_microbatches(model: nn.Module, name: str, accum_steps: int) -> None:
    """Raise InputError if `model` cannot be trained in `accum_steps` microbatches."""
    if about(model).has_batch_statistics and accum_steps > 1:
        raise InputError(
            f"optimizer.accum_steps={accum_steps}: model.name={name!r} computes statistics of the "
            "whole batch; set --config.optimizer.accum_steps=1, with a smaller "
            "--config.global_batch_size or --config.model.remat=full if memory is short"
        )


def _warn_of_uneven_split(model: nn.Module, mesh: Mesh) -> None:
    tensor = mesh.shape["tensor"]
    split = ("num_heads", "mlp_dim", "stem_width")
    uneven = [field for field in split if getattr(model, field, 0) % tensor]
    if uneven:
        logger.warning(
            "mesh.tensor=%d does not divide %s: activations are replicated instead of split; "
            "choose a size that divides them",
            tensor,
            " and ".join(f"model.{f}={getattr(model, f)}" for f in uneven),
        )
