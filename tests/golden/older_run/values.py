"""Computes values.json: what the commands of commit 918fdf2 give for the stopped run.

From a checkout of commit 918fdf2, with this folder in it:

PYTHONPATH=$PWD python tests/golden/older_run/values.py
"""

import contextlib
import io
import json
import os
import pathlib
import tempfile

import numpy as np

FOLDER = pathlib.Path(__file__).parent
FILES = {"npz": "run.npz", "npz_v2": "run.npz", "timm": "run", "stablehlo": "run.stablehlo"}
SIZE, NUM_CLASSES = (16, 8), 3  # of the model that takes the weights over


def command(*words):
    """What a command prints on standard output."""
    from vit_jax.main import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(words)
    assert code == 0, words
    return printed.getvalue()


def evaluate(folder):
    data = f"--config.data.data_dir={folder}/pictures"
    return json.loads(command("evaluate", f"--workdir={folder}/workdir", data))


def predict(folder):
    """{file: probability of the first class}."""
    words = (f"--workdir={folder}/workdir", "--format=json", f"{folder}/pictures")
    rows = map(json.loads, command("predict", *words).splitlines())
    return {
        os.path.relpath(row["file"], folder): found["probability"]
        for row in rows
        for found in row["classes"]
        if found["index"] == 0
    }


def export(folder, format, target):
    """SHA-256 of the parameters, and logits of the exported model."""
    import jax.export

    import vit_jax

    path = pathlib.Path(target) / FILES[format]
    command("export", f"--workdir={folder}/workdir", f"--output={path}", f"--format={format}")
    beside = path.parent / f"{path.stem}.receipt.json"
    receipt = path / "receipt.json" if path.is_dir() else beside
    if format == "stablehlo":
        logits = jax.export.deserialize(bytearray(path.read_bytes())).call(images((8, 8)))
    else:
        model, variables = vit_jax.load_pretrained(path)
        logits = model.apply(variables, images((8, 8)))
    sha256 = json.loads(receipt.read_text())["parameters"]["sha256"]
    return {"sha256": sha256, "logits": np.asarray(logits).tolist()}


def transfer(folder):
    """Positions and features of the model at another size, for other classes."""
    import vit_jax

    model, variables = vit_jax.load_pretrained(f"{folder}/workdir", NUM_CLASSES, SIZE)
    assert not np.any(variables["params"]["head"]["kernel"])
    features = model.apply(variables, images(SIZE), method="features")
    return {
        "pos_embedding": np.asarray(variables["params"]["pos_embedding"]).tolist(),
        "features": np.asarray(features).tolist(),
    }


def entries(folder):
    """An entry of each evaluator as config.json holds it."""
    del folder
    from vit_jax import config

    one, two = {"split": "val"}, {"train_split": "train", "test_split": "val"}
    made = {
        "classification": config.classification(every="1 epochs", **one),
        "real": config.real(every="1 epochs", labels_file="real.json", **one),
        "fewshot": config.fewshot(every="1 epochs", **two),
        "knn": config.knn(every="1 epochs", **two),
        "linear_probe": config.linear_probe(every="1 epochs", **two),
    }
    return {kind: json.loads(json.dumps(entry.to_dict())) for kind, entry in made.items()}


def images(size):
    return np.random.default_rng(0).uniform(-1, 1, (2, *size, 3)).astype(np.float32)


def main():
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    values = {step.__name__: step(FOLDER) for step in (evaluate, predict, transfer, entries)}
    values["export"] = {}
    for format in FILES:
        with tempfile.TemporaryDirectory() as target:
            values["export"][format] = export(FOLDER, format, target)
    (FOLDER / "values.json").write_text(json.dumps(values) + "\n")


if __name__ == "__main__":
    main()
