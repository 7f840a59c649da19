"""Evaluation of any model without training, by its own classes or by its features.

python -m vit_jax.main evaluate --init_from=SOURCE --config=configs/evaluate.py:knn,probe,cifar10

SOURCE is a workdir, an .npz or .safetensors file, an address, or a name such as ViT-B/16@augreg.
The words name evaluators (default: fewshot, knn, probe) and a data set: a TFDS name (in
--config.data.data_dir=DIR), vtab/TASK, digits or folder. Override splits by the evaluator's name:
--config.evals.knn.train_split='train[:10%]'. A few seconds, with the quickstart's run:
--config=configs/evaluate.py:debug
"""

import difflib

from vit_jax.base.errors import InputError, nearest
from vit_jax.config import (
    base_config,
    classification,
    depth,
    fewshot,
    knn,
    linear_probe,
    mapped,
    multilabel,
    rank,
    real,
    refuse_words,
    retrieval,
    segmentation,
    split_words,
    zeroshot,
)

EVALUATORS = {  # word: the function that makes its entry, and its meaning
    "classification": (classification, "accuracy, loss and calibration on the model's own classes"),
    "multilabel": (
        multilabel,
        "mean average precision of the model's own classes, several per image",
    ),
    "mapped": (
        mapped,
        "accuracy on some of the model's classes; .class_map=FILE maps others to them",
    ),
    "real": (real, "ImageNet ReaL; --config.evals.real.labels_file=real.json"),
    "fewshot": (fewshot, "least squares on the features of a few images per class"),
    "knn": (knn, "vote of the nearest neighbours in feature space"),
    "probe": (linear_probe, "logistic regression on features"),
    "rank": (rank, "effective rank of the features; needs no labels"),
    "segmentation": (segmentation, "classes of pixels; --config.evals.segmentation.targets=MASKS"),
    "depth": (depth, "depths of pixels; --config.evals.depth.targets=DEPTHS"),
    "zeroshot": (zeroshot, "accuracy by the words of the classes, of a model with a text tower"),
    "retrieval": (retrieval, "captions found by images and images by captions; needs captions"),
}
FURTHER_KEYS = {  # word: what its entry needs besides splits
    "real": {"labels_file": "real.json"},
    "segmentation": {"targets": "annotations", "ops": "decode|resize"},
    "depth": {"targets": "depths", "ops": "decode|resize"},
}  # fmt: skip
SHIFTS = {  # TFDS has them with the 1,000 labels of ImageNet, A and R with images of 200 of them
    "v2": (classification, "imagenet_v2"),
    "a": (mapped, "imagenet_a"),
    "r": (mapped, "imagenet_r"),
    "sketch": (classification, "imagenet_sketch"),
}
WORDS = {word: meaning for word, (_, meaning) in EVALUATORS.items()} | {
    "shifts": "ImageNet-V2, -A, -R and -Sketch",
    "objectnet": "a folder of ObjectNet; --config.evals.objectnet.data_dir=DIR and .class_map=FILE",
    "debug": "a few seconds, on the digits",
}

TEST_SPLITS = {  # all others: test
    "imagenet2012": "validation", "folder": "val", "list": "val", "unlabelled": "val",
}  # fmt: skip


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    misspelt = [word for word in words if difflib.get_close_matches(word, WORDS)]
    if len(words) > 1 and misspelt:
        raise InputError(f"unknown word {misspelt[0]!r}; {nearest(misspelt[0], list(WORDS))}")
    refuse_words(words[1:], {"DATA": "a data set"} | WORDS, __file__)
    c = base_config()
    c.global_batch_size = 64 if "debug" in chosen else 256
    c.data.name = words[0] if words else "digits" if "debug" in chosen else None

    train = "train800val200" if (c.data.name or "").startswith("vtab/") else "train"
    test = TEST_SPLITS.get(c.data.name, "test")
    of_shifts = bool(chosen & {"shifts", "objectnet"})
    default = [] if of_shifts else ["fewshot", "knn", "probe"]
    for name in [word for word in EVALUATORS if word in chosen] or default:
        make, _ = EVALUATORS[name]
        learns = name in ("fewshot", "knn", "probe", "segmentation", "depth")
        splits = {"train_split": train, "test_split": test} if learns else {"split": test}
        further = FURTHER_KEYS.get(name, {})
        c.evals[name] = make(**splits, **further, every="1 epochs")  # unused without training
    if of_shifts:
        add_shifts(c, chosen)
    if "debug" in chosen and "fewshot" in c.evals:
        c.evals.fewshot.shots, c.evals.fewshot.num_draws = (1, 5), 1
    if "debug" in chosen and "probe" in c.evals:
        c.evals.probe.l2 = (0.01,)
    return c


def add_shifts(c, chosen):
    """Data sets of ImageNet's classes under other conditions, whatever the data set named."""
    if "shifts" in chosen:
        for name, (make, data_name) in SHIFTS.items():
            c.evals[name] = make(split="test", every="1 epochs", data_name=data_name)
    if "objectnet" in chosen:
        c.evals.objectnet = mapped(
            split="all", every="1 epochs", data_name="folder", class_map="objectnet.json"
        )
    c.data.name = c.data.name or "imagenet2012"  # not read unless an evaluator names no other
