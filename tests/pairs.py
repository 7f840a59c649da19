"""Models of images and texts with a tokenizer, made of goldens: their words mean nothing."""

import json
import shutil

import numpy as np
from safetensors.numpy import load_file, save_file

TOKENS = "text_model.embeddings.{}_embedding.weight"


def make_pair(golden, path, name, tokenizer):
    """A folder with the model `name`, whose text tower takes 40 of the ids of `tokenizer`."""
    shutil.copytree(golden / name, path)
    shutil.copytree(golden / tokenizer, path, dirs_exist_ok=True)
    (path / "io.npz").unlink()
    arrays = load_file(path / "model.safetensors")
    rng = np.random.default_rng(0)
    for what, number in (("token", 929), ("position", 40)):
        shape = (number, arrays[TOKENS.format(what)].shape[1])
        arrays[TOKENS.format(what)] = rng.normal(0, 0.1, shape).astype(np.float32)
    save_file(arrays, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= {"vocab_size": 929, "max_position_embeddings": 40}
    (path / "config.json").write_text(json.dumps(config))
    return path


def clip(golden, path):
    return make_pair(golden, path, "hf_clip_pair", "tokenizer_clip")


def siglip(golden, path):
    return make_pair(golden, path, "hf_siglip_pair", "tokenizer_siglip")
