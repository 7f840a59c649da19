"""Muon: the matrices of layers move by orthogonal matrices, all else as AdamW moves it.

    b <- momentum b + g                               u = g + momentum b
    x = u / (||u|| + 1e-7), then five times           a = x x^T
                                                      x <- 3.4445 x + (-4.775 a + 2.0315 a a) x
    d = 0.2 sqrt(max(in, out)) x                      with match_rms, else sqrt(max(1, out / in)) x

x is close to the orthogonal matrix nearest to u. A kernel of a convolution is one matrix, of
height * width * in rows. `optax.contrib.muon` departs from the published updates with its second
step, since it corrects the bias of Nesterov's momentum.

The matrices of all layers are shared out: each device of the mesh computes some of them whole, and
no other device computes those. Matrices of one shape, up to transposition, are shared out together.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.base import tree
from vit_jax.config.parts import key
from vit_jax.devices.sharding import rule_of, share_out
from vit_jax.experiment.optimizers.optimizers import AdamW, decay_of, eps_of, moment_rate

_STEPS, _FACTORS, _EPS = 5, (3.4445, -4.775, 2.0315), 1e-7  # of the iteration


class Muon(AdamW):
    """Jordan et al. 2024 (kellerjordan.github.io/posts/muon); match_rms: Liu et al. 2025.

    AdamW updates the embedding, the head, objectives' parameters, and all vectors. With `match_rms`
    (arXiv:2502.16982, section 2.2) updates are as large as AdamW's, whose learning rate and weight
    decay then serve. As published first: match_rms=false, peak_lr=0.02, adamw_rate=0.015.
    """

    b2: float = decay_of("second moment", 0.95)
    eps: float = eps_of(1e-10)
    momentum: float = decay_of("sum of the gradients", 0.95)
    match_rms: bool = key(True, "updates of matrices are as large as AdamW's")
    adamw_rate: float = key(
        1.0, "learning rate of what AdamW updates / the matrices' learning rate", within="(0, inf)"
    )

    def bind(self) -> optax.GradientTransformation:
        momentum = moment_rate(self.momentum, self.momentum_dtype)
        steps = optax.named_chain(
            ("momentum", optax.trace(momentum, True, self.momentum_dtype)),
            ("orthogonal", optax.stateless(lambda updates, params: self._orthogonal(updates))),
        )
        return optax.named_chain(
            ("matrices", optax.masked(steps, lambda leaves: _are_matrices(leaves, True))),
            ("others", optax.masked(super().bind(), lambda leaves: _are_matrices(leaves, False))),
        )

    def after(
        self, weight_decay_on: str, schedule: optax.Schedule
    ) -> Mapping[str, optax.GradientTransformation]:
        if self.adamw_rate == 1:
            return {}
        slower = optax.masked(
            optax.scale(self.adamw_rate), lambda leaves: _are_matrices(leaves, False)
        )
        return {"weight_decay": slower}

    def _orthogonal(self, updates: optax.Updates) -> optax.Updates:
        def scale(leaf: jax.Array, found: jax.Array) -> jax.Array:
            _, rows, columns = found.shape
            by = (
                0.2 * max(rows, columns) ** 0.5 if self.match_rms else max(1, columns / rows) ** 0.5
            )
            return by * found.reshape(leaf.shape)

        found = orthogonalise(tree.flatten_names(updates))
        structure = jax.tree.structure(updates)
        return jax.tree.map(scale, updates, jax.tree.unflatten(structure, found.values()))


def _are_matrices(leaves: optax.Params, wanted: bool) -> optax.Params:
    """A tree like `leaves` of whether each is a kernel of layers, or is none, as `wanted`."""

    def is_matrix(name: str, leaf: jax.Array) -> bool:
        part = tree.part_of(tree.unrolled_names(name, leaf)[0])
        return part not in ("embedding", "head") and name.endswith("/kernel")

    return jax.tree.map(
        lambda name, leaf: is_matrix(name, leaf) == wanted, tree.leaf_names(leaves), leaves
    )


def orthogonalise(named: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """{name: (layers, in, out)}, the orthogonal matrix near each of the kernels in `named`."""
    wide, turned = {}, set()
    for name, leaf in named.items():
        layers = leaf.shape[0] if tree.is_stacked(name) else 1
        stack = leaf.reshape(layers, -1, leaf.shape[-1])
        _, rows, columns = stack.shape
        # A square that fsdp splits by columns is turned, so that it splits the rows of all.
        if rows > columns or (rows == columns and (rule_of(name) or ("",))[-1] == "fsdp"):
            turned.add(name)
        wide[name] = stack.mT if name in turned else stack

    found: dict[str, jax.Array] = {}
    for shape in {stack.shape[1:] for stack in wide.values()}:
        group = {name: stack for name, stack in wide.items() if stack.shape[1:] == shape}
        ends = np.cumsum([len(stack) for stack in group.values()])
        shared = share_out(_newton_schulz, jnp.concatenate([*group.values()]))
        found |= zip(group, jnp.split(shared, ends[:-1]), strict=True)
    return {name: found[name].mT if name in turned else found[name] for name in named}


def _newton_schulz(u: jax.Array) -> jax.Array:
    """The orthogonal matrix near `u`, which has no more rows than columns."""
    first, second, third = _FACTORS
    x = u / (jnp.linalg.norm(u) + _EPS)
    for _ in range(_STEPS):
        a = x @ x.T
        x = first * x + (second * a + third * a @ a) @ x
    return x
