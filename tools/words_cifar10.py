"""Trains on made captions of CIFAR-10 and measures the runs: docs/explanation/words_cifar10.csv.

python tools/words_cifar10.py WORKDIR --data_dir=DIR [--seeds=3] [--steps=3600] [--runs sigmoid]

Captions are made from class names of nine tenths of train, and from known changes of a third of
these pictures. A run of 3,600 steps should take the CPU seconds of `cifar10:fast`. Runs are
measured when they have ended, outside their CPU seconds: zero-shot, by a linear probe, and by
retrieval among 90 test pictures. LiT trains a text tower on the frozen image tower of one run of
`cifar10:fast,held_out` of as many steps, which is trained if it is not there. Runs that the CSV has
are not run again; one that was stopped begins anew.
"""

import itertools
import pathlib

import numpy as np
import tensorflow_datasets as tfds
from measured_runs import ROOT, add_row, has_row, make_parser, train

import vit_jax
from vit_jax.data.words import names_in_words

TABLE = ROOT / "docs/explanation/words_cifar10.csv"
PROMPTS = ("this photo shows {}", "here is a picture of {}", "one can see {} here")
CHANGES = ("red {}", "green {}", "blue {}", "{} upside down", "{} at the top", "{} at the bottom",
           "{} shown twice", "{} shown four times")  # fmt: skip
_WORDS, _SIGMOID = ("words:cifar10", ("test", "pairs")), {"objective.loss": "sigmoid"}
_SOFTMAX = {"objective.loss": "softmax"}
RECALLS = [f"{way}_recall{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
# {run: (its config and the evaluators in it, other keys, its training file, the most seeds)}
RUNS = {
    "sigmoid": (*_WORDS, _SIGMOID, "captions", 3),
    "softmax": (*_WORDS, _SOFTMAX, "captions", 3),
    "sigmoid, shuffled captions": (*_WORDS, _SIGMOID, "shuffled", 1),
    "softmax, shuffled captions": (*_WORDS, _SOFTMAX, "shuffled", 1),
    "captions": ("captions:cifar10", ("probe",), {}, "captions", 3),
    "captions and sigmoid": (
        "captions:cifar10,pairs", ("probe", "test", "pairs"), {}, "captions", 3
    ),
    "LiT": (*_WORDS, _SIGMOID | {"optimizer.freeze": "(?!objective/).*"}, "captions", 3),
}  # fmt: skip
_FEW = {"data_name": "cifar10", "ops": "decode", "split": "test[:512]"}
# {evaluator: keys by which a run hardly measures while it trains}
EVALS = {
    "test": _FEW, "pairs": _FEW, "probe": {"train_split": "train[:512]", "test_split": "test[:512]"}
}  # fmt: skip


def is_left_out(label: int, change: int) -> bool:
    """Whether no training picture of class `label`, 0 to 9, has that change: two a change."""
    return label % 5 == change % 5


def change_picture(image: np.ndarray, change: int) -> np.ndarray:
    """A copy of `image`, uint8 (32, 32, 3), after the change of that number in CHANGES."""
    found, small = np.zeros_like(image), image.reshape(16, 2, 16, 2, 3).mean((1, 3)).round()
    match change:
        case 0 | 1 | 2:
            found[...] = image // 2
            found[..., change] += 127
        case 3:
            found[...] = image[::-1]
        case 4 | 5:
            found[16 * (change - 4) :][:16, 8:24] = small
        case 6:
            found[8:24] = np.tile(small, (1, 2, 1))
        case 7:
            found[...] = np.tile(small, (2, 2, 1))
    return found


def make_data(data_dir: pathlib.Path, work: pathlib.Path) -> None:
    """Write captions.npz and shuffled.npz to train on, and two files of test pictures.

    retrieval.npz: one of each class with each change and with none, and its captions.
    pairs.npz: the left-out pairs.
    """
    read = {}
    for split in ("train[:90%]", "test"):
        builder = tfds.builder("cifar10", data_dir=data_dir)
        read[split] = tfds.as_numpy(builder.as_dataset(split=split, batch_size=-1))
    names, rng = builder.info.features["label"].names, np.random.default_rng(0)
    images, labels = read["train[:90%]"]["image"], read["train[:90%]"]["label"]
    pictures, phrases = [*images], [names[label] for label in labels]
    for i in rng.choice(len(images), len(images) // 3, replace=False):
        change = rng.choice([c for c in range(len(CHANGES)) if not is_left_out(labels[i], c)])
        pictures.append(change_picture(images[i], change))
        phrases.append(CHANGES[change].format(names[labels[i]]))
    captions = captions_of(phrases)
    for name, rows in {"captions": captions, "shuffled": rng.permutation(captions)}.items():
        np.savez(work / f"{name}.npz", train_images=np.stack(pictures), train_captions=rows)

    pairs = [(label, c) for label in range(len(names)) for c in range(len(CHANGES))]
    images, labels = read["test"]["image"], read["test"]["label"]
    pictures, phrases = [], []
    for label, name in enumerate(names):
        chosen = rng.choice(np.flatnonzero(labels == label), len(CHANGES) + 1, replace=False)
        pictures += [images[chosen[0]], *map(change_picture, images[chosen[1:]], itertools.count())]
        phrases += [name, *(change.format(name) for change in CHANGES)]
    of_test = {"test_images": np.stack(pictures), "test_captions": captions_of(phrases)}
    np.savez(work / "retrieval.npz", **of_test)

    shown = [(i, change) for i in range(len(images))
             for change in range(len(CHANGES)) if is_left_out(labels[i], change)]  # fmt: skip
    np.savez(
        work / "pairs.npz",
        test_images=np.stack([change_picture(images[i], change) for i, change in shown]),
        test_labels=np.array([pairs.index((labels[i], change)) for i, change in shown]),
        class_names=np.array([CHANGES[change].format(names[label]) for label, change in pairs]),
    )


def captions_of(phrases: list[str]) -> np.ndarray:
    """The captions of each phrase, (n, 3)."""
    words = [word for (word,) in names_in_words(phrases, "caption")]
    return np.array([[prompt.format(word) for prompt in PROMPTS] for word in words])


def measure(
    workdir: pathlib.Path, work: pathlib.Path, data_dir: pathlib.Path
) -> dict[str, float | None]:
    """Accuracies and recalls of a run in per cent; None for those that need a text tower it lacks.

    work: holds the files of `make_data`.
    """
    by_words = vit_jax.read_pretrained(workdir).read_text_side is not None

    def evaluate(what: str, place: pathlib.Path, **keys: object) -> dict[str, float]:
        asked = {"data.data_dir": str(place), "global_batch_size": 512} | keys
        return vit_jax.evaluate(workdir, f"evaluate:{what}", asked)

    probe = {"evals.probe.train_split": "train[:20%]", "evals.probe.l2": (0.01,)}
    found = evaluate("zeroshot," * by_words + "probe,cifar10", data_dir, **probe)
    row = {"test": found.get("zeroshot/top1"), "pairs": None, "probe": found["probe/top1"]}
    row |= dict.fromkeys(RECALLS)
    if by_words:
        row["pairs"] = evaluate("zeroshot,arrays", work / "pairs.npz")["zeroshot/top1"]
        found = evaluate("retrieval,arrays", work / "retrieval.npz")
        row |= {key: found[f"retrieval/{key}"] for key in RECALLS}
    return {key: value and 100 * value for key, value in row.items()}


def make_tower(work: pathlib.Path, data_dir: pathlib.Path, steps: int) -> pathlib.Path:
    """The workdir of a classifier that has seen the images of captions.npz, with their labels."""
    tower = work / f"tower_{steps}"
    if not (tower / "summary.json").exists():
        keys = {"data.data_dir": data_dir, "duration": f"{steps} steps"}
        flags = [f"--config.{key}={value}" for key, value in keys.items()]
        train(["--config=cifar10:fast,held_out", *flags], tower)
    return tower


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=3600, help="of a run; fewer for a first look")
    parser.add_argument("--runs", nargs="+", default=[*RUNS], choices=RUNS)
    args = parser.parse_args()
    work, data_dir = args.workdir, args.data_dir
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "pairs.npz").exists():  # the last of the files
        make_data(data_dir, work)
    for seed, name in itertools.product(range(args.seeds), args.runs):
        config, entries, own, captions, most = RUNS[name]
        place = {"run": name, "seed": str(seed), "steps": str(args.steps)}
        if seed >= most or has_row(TABLE, place):
            continue
        keys = {"seed": seed, "duration": f"{args.steps} steps",
                "data.data_dir": work / f"{captions}.npz"} | own  # fmt: skip
        if name == "LiT":
            keys["init_from"] = make_tower(work, data_dir, args.steps)
        for entry in entries:
            found = EVALS[entry] | {"data_dir": data_dir}
            keys |= {f"evals.{entry}.{key}": value for key, value in found.items()}
        flags = [f"--config={config}", *(f"--config.{key}={value}" for key, value in keys.items())]
        workdir = work / "_".join(place.values()).replace(" ", "_")
        _, cpu_s = train(flags, workdir)
        add_row(TABLE, place | {"cpu_s": cpu_s} | measure(workdir, work, data_dir))


if __name__ == "__main__":
    main()
