"""Measures how much `predict` takes beside reading its images and computing the model.

python tools/predict_rate.py --data_dir=DIR [--rounds=3]

DIR holds imagenet_sample/VERSION, 500 photographs of ImageNet's size. The model is a small ViT of
224 pixels and 1,000 classes with random weights. Each round reads the images only, computes their
probabilities, and writes classes and features into new folders, in turn. Prints medians over the
rounds: the CPU milliseconds an image of all threads, those of the main thread, which neither reads
images nor, where a chip computes, computes the model, and the rate as a share of reading only in
the same round, by the CPU time of all threads.
"""

import argparse
import functools
import tempfile
import time

import numpy as np
from etils import epath

from vit_jax.data import image_batch, make_source, parse_ops
from vit_jax.data.pipeline import host_eval_batches
from vit_jax.inference.outputs import outputs
from vit_jax.inference.saved import write_predictions
from vit_jax.models import create_model
from vit_jax.transfer.pretrained import Pretrained, Spec, ops_for
from vit_jax.transfer.shapes import abstract_params

BATCH = 50  # divides the photographs, so that no batch is padded
SIZE = (224, 224)


def build_model() -> Pretrained:
    model, rng = create_model("ViT-mu/56", 1000, SIZE), np.random.default_rng(0)
    shapes = abstract_params(model).items()
    params = {name: rng.normal(0, 0.1, x.shape).astype(np.float32) for name, x in shapes}
    return Pretrained("random", model, params, Spec(SIZE, "antialiased", loss="softmax"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    given = make_source("imagenet_sample", split="train", image_size=SIZE, data_dir=flags.data_dir)
    pretrained = build_model()
    spec = image_batch(BATCH, SIZE, parse_ops(ops_for(pretrained.spec), SIZE)[0])

    def read() -> None:
        for _ in host_eval_batches(given, spec, rows=np.arange(BATCH)):
            pass

    def compute() -> None:
        for _ in outputs(pretrained, given, what="probabilities", batch_size=BATCH):
            pass

    def write(what: str, **choice: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            place, how = epath.Path(folder), {"batch_size": BATCH, **choice}
            write_predictions(pretrained, given, place, "--output", what=what, **how)

    classes = functools.partial(write, "classes", top=5, thresholds=0.0)
    calls = {"read": read, "compute": compute, "classes": classes,
             "features": functools.partial(write, "features")}  # fmt: skip
    found: dict[str, list[np.ndarray]] = {name: [] for name in calls}
    for _ in range(flags.rounds + 1):
        for name, call in calls.items():
            start = np.array([time.process_time(), time.thread_time()])
            call()
            found[name].append(np.array([time.process_time(), time.thread_time()]) - start)
    for name, seconds in found.items():
        ms = 1e3 * np.median(seconds[1:], axis=0) / given.num_examples  # the first one compiles
        share = np.median([r[0] / s[0] for r, s in zip(found["read"], seconds, strict=True)][1:])
        print(f"{name}: {ms[0]:.2f} ms, main thread {ms[1]:.2f} ms, rate {share:.2f}")


if __name__ == "__main__":
    main()
