"""Your own pictures and a list of their captions: two small towers from scratch, minutes on a CPU.

python -m vit_jax.main --config=configs/words.py:folder --config.data.data_dir=LIST.csv --workdir=$W
python -m vit_jax.main predict --init_from=$W --labels="a cat,a dog,nothing" PICTURES

LIST.csv has the columns file and caption, a line for each caption; paths are relative to its
folder. Without --config.data.tokenizer the run trains one on the captions. The loss is SigLIP's
(arXiv:2303.15343); equal captions of other pictures are no negatives. Our choices: a ViT of 1.2
million parameters at 64 px, a text tower of 4 layers as wide, 32 tokens, 2,000 steps of 64
pictures, whole and flipped. Where captions say left or right, leave out flip:
--config.data.ops="scaled_decode|resize"
A few seconds, on made-up pictures: --config=configs/words.py:debug

words:cifar10 is what tools/words_cifar10.py trains, on captions that it makes for CIFAR-10: the
image tower, batch and optimizer of cifar10:fast, and a text tower of one layer, 64 wide.
"""

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, rank, split_words, zeroshot
from vit_jax.run.setup.recipes import (
    debug_on_captions,
    set_length,
    use_adamw,
    use_captions,
    use_cifar10_fast,
    use_vit,
)

WORDS = {
    "folder": "your own pictures and a list of their captions",
    "cifar10": "made captions of CIFAR-10, for tools/words_cifar10.py",
    "debug": "20 steps of tiny towers on made-up pictures",
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    if words or len(chosen) != 1:
        raise InputError(f"got {arg!r}, needs folder, cifar10 or debug")
    c = base_config()
    use_captions(c, "ViT-Ti/8", "sigmoid", text_length=32)
    use_vit(c.model, "ViT-Ti/8", 128, 6, 512, 4, pool="map", dtype="float32")
    c.objective.duplicates, c.objective.text_depth = "ignored", 4
    c.data.name, c.data.image_size = "list", 64
    c.data.ops = "scaled_decode|resize|flip"
    set_length(c, 64, "2000 steps", "10 %", save="250 steps", log="2 %")
    use_adamw(c)
    c.evals.rank = rank(split="train", every="25 %", ops="scaled_decode|resize", num_images=2000)
    if "cifar10" in chosen:
        use_cifar10_fast(c)
        c.model.pool = "gap"
        c.objective.update(text_width=64, text_depth=1, text_heads=2, text_mlp_dim=128)
        c.data.name, c.data.image_size, c.data.ops = "arrays", 32, "pad_crop(2)|flip"
        c.duration, c.data.text_length = "3600 steps", 24
        common = {"every": "100 %", "batch_size": 512}
        del c.evals["rank"]
        c.evals.test = zeroshot(data_name="cifar10", split="test", ops="decode", **common)
        c.evals.pairs = zeroshot(data_name="arrays", split="test", ops="", **common)
    if "debug" in chosen:
        del c.evals["rank"]
        c.evals.zeroshot = zeroshot(split="test", every="20 steps")
        debug_on_captions(c)
    return c
