"""The blocks of DeiT III and ViT-5 against the plain ViT's, on CIFAR-10, with equal compute.

python -m vit_jax.main study --config=configs/blocks_of_today.py --workdir=$W \\
  --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/blocks_of_today.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. Each model trains with three seeds. Only blocks and
tokens differ: DeiT III (arXiv:2204.07118) has layer scale from 1e-4, the exact GELU and no position
of the class token. ViT-5 (arXiv:2602.08071) has these too, and RMS norms, also of queries and keys,
no biases of q, k and v, rotary positions beside the learned ones, and four registers. Its 21 tokens
instead of 17 cost more, so it takes fewer steps: all runs have equal FLOPs, to 0.1 %. Results:
docs/explanation/results.md.
"""

from vit_jax.config import classification
from vit_jax.run.setup.recipes import (
    begin,
    debug_on_digits,
    set_length,
    use_adamw,
    use_cifar10,
    use_vit,
)

WORDS = {"debug": "a few steps of a tiny model, one seed"}

OF_BOTH = "model.layer_scale=1e-4; model.pos_embed_class_token=false; model.gelu=exact"
BLOCKS = {
    "plain ViT": "",
    "DeiT III": OF_BOTH,
    "ViT-5": f"{OF_BOTH}; model.norm=rms; model.qk_norm=true; model.qkv_bias=false; "
    "model.registers=4; model.rotary=indices; model.rotary_base=10000; model.rotary_registers=100",
}
STEPS = {"plain ViT": 800, "DeiT III": 800, "ViT-5": 646}  # of equal FLOPs


def get_config(arg=""):
    c, chosen = begin(arg, WORDS, __file__)
    set_length(c, 64, "800 steps", "10 %", save="800 steps", log="50 steps")
    use_vit(c.model, "ViT-Ti/8", 96, 4, 384, 3)
    use_cifar10(c, split="train[:90%]")
    c.evals.test = classification(split="test", every="800 steps", ops="decode", batch_size=500)
    use_adamw(c)

    c.study.name, c.study.metric = "grid", "test/top1"
    steps = STEPS
    if "debug" in chosen:
        debug_on_digits(c)
        c.study.seeds, steps = 1, dict.fromkeys(STEPS, 20)
    c.study.cells = tuple(
        f"{name} | test: duration={steps[name]} steps; {fields}" for name, fields in BLOCKS.items()
    )
    return c
