"""Captions as a target: a decoder writes each image's caption (arXiv:2306.07915): captions:MODEL

python -m vit_jax.main --config=configs/captions.py:ViT-B/16 --config.data.data_dir=TARS \\
  --workdir=$W
Your own pictures, minutes on a CPU, from a list with the columns file and caption:
  --config=configs/captions.py:folder,pairs --config.data.data_dir=LIST.csv
A minute on a CPU, on made-up images: --config=configs/captions.py:debug

MODEL is a ViT. TARS is a folder of tar files with images and captions, NAME.jpg and NAME.txt.
Without --config.data.tokenizer the run trains one on them. --config.model.keep_tokens=0.3 encodes
three of ten patches in training: OpenVision 2 (arXiv:2509.01644) trains by captions only with 25 to
35 % of them.

From the published config of CapPa (big_vision): batches of 8,192, 366,500 steps with 10,000 of
warm-up, a cosine, Adafactor at 1e-3 with weight decay 1e-4 and b2 of at most 0.999, clipping at
norm 1, 224 px, the whole image, texts of 64 tokens by SentencePiece with 32,000 ids, a decoder of 6
layers as wide as the model, three of four captions predicted in parallel. Our choices: MLPs and
norms of the decoder have biases; mean pooling; bfloat16.

Five images of each class classify ImageNet: --config.evals.fewshot.data_dir=DIR. A plan needs no
data: --config.data.num_classes=1 --config.data.num_examples=1000000000
"""

from vit_jax.base.errors import InputError
from vit_jax.config import (
    base_config,
    fewshot,
    linear_probe,
    rank,
    retrieval,
    split_words,
    zeroshot,
)
from vit_jax.run.setup.recipes import (
    EVAL_OPS,
    debug_on_captions,
    set_length,
    use_adamw,
    use_captions,
    use_cifar10_fast,
    use_vit,
)

WORDS = {
    "pairs": "adds the contrastive loss of siglip, for search and classification by words",
    "folder": "your own pictures and a list of their captions",
    "cifar10": "made captions of CIFAR-10, for tools/words_cifar10.py",
    "debug": "20 steps of tiny towers on made-up images, with folder on your own",
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    small = {"folder", "cifar10"} & chosen
    if (chosen & {"debug"} or small) and not words:
        words = ["ViT-B/16"]
    if len(words) != 1 or len(small) > 1:
        raise InputError(f"got {arg!r}, needs a ViT, such as ViT-B/16, or folder, cifar10 or debug")
    c = base_config()
    use_captions(c, words[0], "sigmoid", text_length=64)
    c.objective.name = "captions"
    c.objective.contrastive_weight = 1.0 if "pairs" in chosen else 0.0
    c.model.update(pool="gap", gelu="tanh", dtype="bfloat16")
    if small:
        use_small(c, *small)
    else:
        set_length(c, 8192, "366500 steps", "10000 steps", save="1000 steps", log="50 steps")
        use_adamw(c, 1e-3, 1e-4)
        c.optimizer.name, c.optimizer.b2 = "adafactor", 0.999
        c.evals.fewshot = fewshot(
            data_name="imagenet2012", train_split="train", test_split="validation?",
            every="5000 steps", ops=EVAL_OPS, shots=(5,),
        )  # fmt: skip
    if "debug" in chosen:
        debug_on_captions(c, own="folder" in chosen)
    return c


def use_small(c, data):
    """Small towers, on own pictures or on the captions of CIFAR-10; as in `words`."""
    c.objective.update(duplicates="ignored", decoder_depth=2)
    if data == "folder":
        use_vit(c.model, "ViT-Ti/8", 128, 6, 512, 4, dtype="float32")
        c.objective.text_depth = 4
        c.data.name, c.data.image_size, c.data.text_length = "list", 64, 32
        c.data.ops = "scaled_decode|resize|flip"
        set_length(c, 64, "2000 steps", "10 %", save="250 steps", log="2 %")
        use_adamw(c)
        how = {"every": "25 %", "ops": "scaled_decode|resize", "num_images": 2000}
        c.evals.rank = rank(split="train", **how)
        if c.objective.contrastive_weight:
            del how["num_images"]
            c.evals.retrieval = retrieval(split="val?", **how)
        return
    use_cifar10_fast(c)
    c.model.dtype = "float32"
    c.objective.update(text_width=64, text_depth=1, text_heads=2, text_mlp_dim=128)
    c.objective.update(decoder_width=64, decoder_depth=1, decoder_heads=2, decoder_mlp_dim=128)
    c.data.name, c.data.image_size, c.data.ops = "arrays", 32, "pad_crop(2)|flip"
    c.duration, c.data.text_length = "3600 steps", 24
    common = {"data_name": "cifar10", "every": "100 %", "batch_size": 512, "ops": "decode"}
    c.evals.probe = linear_probe(train_split="train[:90%]", test_split="test", l2=(0.01,), **common)
    if c.objective.contrastive_weight:
        c.evals.test = zeroshot(split="test", **common)
        c.evals.pairs = zeroshot(split="test", **common | {"data_name": "arrays", "ops": ""})
