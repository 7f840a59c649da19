"""Evaluation of any model without training, by its own classes or by its features.

python -m vit_jax.main evaluate --init_from=SOURCE --config=configs/evaluate.py:knn,probe,cifar10

SOURCE is a workdir, an .npz or .safetensors file, an address, or a name such as ViT-B/16@augreg.
The words name evaluators (default: fewshot, knn, probe) and a data set: a TFDS name (in
--config.data.data_dir=DIR), vtab/TASK, digits or folder. Override splits by the evaluator's name:
--config.evals.knn.train_split='train[:10%]'. A few seconds, with the quickstart's run:
--config=configs/evaluate.py:debug
"""

import difflib

from vit_jax.config import (
    base_config,
    classification,
    fewshot,
    knn,
    linear_probe,
    mapped,
    multilabel,
    rank,
    real,
    refuse_words,
    split_words,
)
from vit_jax.errors import InputError, nearest

EVALUATORS = {
    "classification": "accuracy, loss and calibration on the model's own classes",
    "multilabel": "mean average precision of the model's own classes, several per image",
    "mapped": "accuracy on some of the model's classes; .class_map=FILE maps others to them",
    "real": "ImageNet ReaL; --config.evals.real.labels_file=real.json",
    "fewshot": "least squares on the features of a few images per class",
    "knn": "vote of the nearest neighbours in feature space",
    "probe": "logistic regression on features",
    "rank": "effective rank of the features; needs no labels",
}
SHIFTS = {  # TFDS has them with the 1,000 labels of ImageNet, A and R with pictures of 200 of them
    "v2": ("classification", "imagenet_v2"),
    "a": ("mapped", "imagenet_a"),
    "r": ("mapped", "imagenet_r"),
    "sketch": ("classification", "imagenet_sketch"),
}
WORDS = EVALUATORS | {
    "shifts": "ImageNet-V2, -A, -R and -Sketch",
    "objectnet": "a folder of ObjectNet; --config.evals.objectnet.data_dir=DIR and .class_map=FILE",
    "debug": "a few seconds, on the digits",
}

TEST_SPLITS = {"imagenet2012": "validation", "folder": "val", "list": "val"}  # all others: test


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    misspelt = [word for word in words if difflib.get_close_matches(word, WORDS)]
    if len(words) > 1 and misspelt:
        raise InputError(f"unknown word {misspelt[0]!r}; {nearest(misspelt[0], list(WORDS))}")
    refuse_words(words[1:], {"DATA": "a data set"} | WORDS, __file__)
    c = base_config()
    c.global_batch_size = 256
    c.data.name = words[0] if words else "digits" if "debug" in chosen else None

    train, test = "train", TEST_SPLITS.get(c.data.name, "test")
    if (c.data.name or "").startswith("vtab/"):
        train = "train800val200"
    of_classes = {"split": test, "every": "1 epochs"}  # `every` is unused without training
    of_features = {"train_split": train, "test_split": test, "every": "1 epochs"}
    make = {
        "classification": lambda: classification(**of_classes),
        "multilabel": lambda: multilabel(**of_classes),
        "mapped": lambda: mapped(**of_classes),
        "real": lambda: real(**of_classes, labels_file="real.json"),
        "fewshot": lambda: fewshot(**of_features),
        "knn": lambda: knn(**of_features),
        "probe": lambda: linear_probe(**of_features),
        "rank": lambda: rank(split=test, every="1 epochs"),
    }
    of_shifts = bool(chosen & {"shifts", "objectnet"})
    default = [] if of_shifts else ["fewshot", "knn", "probe"]
    for name in [e for e in EVALUATORS if e in chosen] or default:
        c.evals[name] = make[name]()
    if of_shifts:
        add_shifts(c, chosen)

    if "debug" in chosen:
        c.global_batch_size = 64
        for entry in c.evals.values():
            if entry.type == "fewshot":
                entry.shots, entry.num_draws = (1, 5), 1
            if entry.type == "linear_probe":
                entry.l2 = (0.01,)
    return c


def add_shifts(c, chosen):
    """Data sets of ImageNet's classes under other conditions, whatever the data set named."""
    kinds = {"classification": classification, "mapped": mapped}
    if "shifts" in chosen:
        for name, (kind, data_name) in SHIFTS.items():
            c.evals[name] = kinds[kind](split="test", every="1 epochs", data_name=data_name)
    if "objectnet" in chosen:
        c.evals.objectnet = mapped(
            split="all", every="1 epochs", data_name="folder", class_map="objectnet.json"
        )
    c.data.name = c.data.name or "imagenet2012"  # not read unless an evaluator names no other
