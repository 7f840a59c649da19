"""What each of 8 devices computes and sends in an update of ViT-B/16, by the compiled program.

XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python tools/muon_shares.py

Writes the table of "Muon" in docs/explanation/performance.md.
"""

import math

import jax
import optax

from vit_jax.base import tree
from vit_jax.config import OPTIMIZERS
from vit_jax.devices.flops import count_flops
from vit_jax.devices.mesh import make_mesh
from vit_jax.experiment.experiment import with_shardings
from vit_jax.experiment.optimizers import make_optimizer
from vit_jax.experiment.state import init_state
from vit_jax.models import create_model
from vit_jax.planning.hlo import Program

MESHES = ({}, {"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 4})


def update_of(optimizer: str, sizes: dict[str, int]) -> tuple[Program, int, int]:
    """The compiled update over a mesh; the FLOPs and the bytes of all its matrices."""
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = make_mesh(**{"replica": 1, "data": 1, "fsdp": 1, "tensor": 1} | sizes, devices=devices)
    model = create_model("ViT-B/16", 1000, scan=True)
    tx = make_optimizer(
        OPTIMIZERS.make({"name": optimizer, "weight_decay": 0.1}), schedule=lambda step: 0.1
    )
    with jax.set_mesh(mesh):
        state = jax.eval_shape(lambda: init_state(model, tx, (224, 224), 0))
        state = with_shardings(state, mesh)

        def update(state, grads):
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            return state.replace(
                params=optax.apply_updates(state.params, updates), opt_state=opt_state
            )

        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        compiled = jax.jit(update, out_shardings=shardings).lower(state, state.params).compile()
        flops = count_flops(update, state, state.params)
    kernels = [leaf for name, leaf in tree.flatten_names(state.params["encoder"]).items()
               if name.endswith("/kernel")]  # fmt: skip
    return Program(compiled.as_text()), flops, sum(4 * leaf.size for leaf in kernels)


def main() -> None:
    """Print the table."""
    print("| mesh | matrix products | MiB of matrices | GFLOP | MiB sent | with AdamW |")
    print("|---|---|---|---|---|---|")
    alone = update_of("muon", {})[0].products().total()
    for sizes in MESHES:
        (program, flops, size), (plain, *_) = (update_of(name, sizes) for name in ("muon", "adamw"))
        products = program.products().total()
        share = products / alone
        mesh = ", ".join(f"{axis} {size}" for axis, size in sizes.items()) or "one device"
        sent = [sum(c.sent * c.count for c in p.collectives()) / 2**20 for p in (program, plain)]
        of_device = f"{size / 2**20 * share:.1f} | {flops / 1e9 * share:,.0f}"
        print(f"| {mesh} | {products:,} | {of_device} | {sent[0]:.0f} | {sent[1]:.0f} |")


if __name__ == "__main__":
    main()
