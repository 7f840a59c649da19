"""Exports small models of every kind to each runtime, and adds a row for each to a table.

python tools/export_formats.py [--only=WORD]   # the rows that the table lacks
python docs/hooks.py                           # puts the table into docs/how_to/deploy.md

The models have random weights and a few layers; most are in tests/golden. Floats are compared on
parts of two photographs. int8 is compared on pictures in folders of the class that the model gives,
so its top-1 is the share of pictures with the same class; other pictures calibrate it.
"""

import argparse
import csv
import io
import os
import pathlib
import tempfile
from collections.abc import Iterator

import numpy as np
from etils import epath
from PIL import Image

import vit_jax
from vit_jax.base.errors import InputError
from vit_jax.base.files import write_whole
from vit_jax.insight.tables import as_csv
from vit_jax.models import create_model
from vit_jax.transfer import read_pretrained, with_image_size
from vit_jax.transfer.pretrained import Pretrained, Spec, class_names
from vit_jax.transfer.program import GIVES, Choice
from vit_jax.transfer.runtimes import RUNTIMES, export_program, sample_pictures
from vit_jax.transfer.shapes import abstract_model_state, abstract_params

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs/how_to/exports.csv"
COLUMNS = ("model", "format", "precision", "cosine", "error", "same_class", "ms", "ours_ms",
           "refused")  # fmt: skip
MODELS = {  # {kind: file of tests/golden}
    "ViT, class token": "vit_finetuned.npz",
    "ViT, hidden head layer": "vit_pretrained.npz",
    "ViT, mean of patches": "vit_v2_gap.npz",
    "ViT, attention pooling": "vit_v2_map.npz",
    "ViT, several labels": "hf_vit",
    "DeiT, two heads": "hf_deit",
    "DeiT III": "timm_deit3.safetensors",
    "DINOv2, no head": "timm_dinov2.safetensors",
    "DINOv2, SwiGLU": "hf_dinov2_swiglu",
    "DINOv2, registers": "hf_dinov2_with_registers_classifier",
    "DINOv3, rotary": "timm_dinov3.safetensors",
    "DINOv3, no head": "hf_dinov3",
    "SigLIP, no head": "timm_siglip.safetensors",
    "SigLIP, mean of patches": "timm_siglip_gap.safetensors",
    "SigLIP 2, at one size": "hf_siglip2",
    "image tower of SigLIP": "hf_siglip_pair",
    "image tower of CLIP": "hf_clip_pair",
    "text tower of SigLIP": "hf_siglip_pair",
    "text tower of CLIP": "hf_clip_pair",
    "CLIP": "timm_clip.safetensors",
    "EVA-02, rotary": "timm_eva02.safetensors",
    "ViT-5": "vit5.safetensors",
    "hybrid, root block": "hybrid_root.npz",
    "hybrid, stages": "hybrid_resnet.npz",
    "BiT": "bit.npz",
    "EfficientNet": "timm_efficientnet.safetensors",
    "T2T, transformer": "t2t_transformer.safetensors",
    "T2T, performer": "t2t_performer.safetensors",
}
BUILT = {  # {kind: name and fields}
    "ViT, relative positions": ("ViT-Ti/16", {"pos_embed": "relative"}),
    "ViTC, convolutional stem": ("ViTC-1GF", {}),
    "Axial-ViT": ("Axial-ViT-B/16", {}),
}


def read_model(kind: str) -> Pretrained:
    """The model, at 48 pixels if it takes any size; with labels of their own by the sigmoid."""
    if kind in BUILT:
        return build_model(*BUILT[kind])
    pretrained = read_pretrained(ROOT / "tests/golden" / MODELS[kind])
    if pretrained.spec.image_size is None:
        pretrained = with_image_size(pretrained, 48)
    loss = "sigmoid" if "several" in kind else pretrained.spec.loss
    return pretrained._replace(spec=pretrained.spec._replace(loss=loss))


def build_model(name: str, fields: dict[str, object]) -> Pretrained:
    """A model for 64 pixels and 7 classes whose random parameters are all other than 0."""
    fields = {"width": 64, "depth": 2, "mlp_dim": 96, "num_heads": 2} | fields
    model, spec = create_model(name, 7, 64, **fields), Spec((64, 64), "antialiased")
    rng, shapes = np.random.default_rng(0), abstract_params(model)
    params = {key: rng.normal(0, 0.2, x.shape).astype(np.float32) for key, x in shapes.items()}
    state = abstract_model_state(model)
    found = {key: rng.uniform(0.5, 1, x.shape).astype(np.float32) for key, x in state.items()}
    return Pretrained(name, model, params, spec, model_state=found)


def write_pictures(pretrained: Pretrained, folder: str) -> dict[str, epath.PathLike]:
    """Pictures by the class that the model gives them, and turned ones for calibration."""
    names, root = class_names(pretrained.spec, pretrained.model.num_classes), pathlib.Path(folder)
    pictures = [Image.open(io.BytesIO(content)) for content in sample_pictures()]
    logits = vit_jax.predict(pictures, pretrained, output="logits")
    for i, (picture, best) in enumerate(zip(pictures, np.argmax(logits, -1), strict=True)):
        path = root / "pictures" / names[best] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
        (root / "calibration").mkdir(exist_ok=True)
        picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(root / f"calibration/{i}.png")
    return {name: root / name for name in ("pictures", "calibration")}


def measure(pretrained: Pretrained, kind: str, format: str, precision: str) -> dict[str, object]:
    """A row of the table, without its first columns."""
    gives = "features" if pretrained.model.num_classes is None else (
        "probabilities" if "several" in kind else "logits"
    )  # fmt: skip
    gives = "text_features" if kind.startswith("text") else gives
    one, what = GIVES[gives], "text" if kind.startswith("text") else "image"
    choice = Choice(gives=gives, precision=precision)
    with tempfile.TemporaryDirectory() as folder:
        try:
            if precision == "int8" and what == "image":
                where: dict[str, epath.PathLike] = {
                    "pictures": folder,
                    "calibration": folder,
                }  # of features: is refused
                if one != "feature":
                    where = write_pictures(pretrained, folder)
                choice = choice._replace(max_drop=0.99, **where)
            choice.check(format, RUNTIMES[format].PRECISIONS)
            path = epath.Path(folder) / f"m.{format}"
            _, found = export_program(path, pretrained, format, choice)
        except (InputError, RuntimeError) as e:
            return {"refused": " ".join(str(e).split())}
    error = found[f"largest_{one}_difference"] / found[f"largest_{one}"]
    return {"cosine": f"{found['cosine']:.7f}", "error": f"{error:.2g}",
            "same_class": found.get("top1", found.get("same_class", "")),
            "ms": f"{found[f'ms_per_{what}']:.3g}",
            "ours_ms": f"{found[f'vit_jax_ms_per_{what}']:.3g}"}  # fmt: skip


def rows_to_make(only: str) -> Iterator[tuple[str, str, str]]:
    for kind in (*MODELS, *BUILT):
        for format, runtime in RUNTIMES.items():
            for precision in runtime.PRECISIONS:
                if only in f"{kind} {format} {precision}":
                    yield kind, format, precision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help="rows with it")
    flags = parser.parse_args()
    rows = [*csv.DictReader(TABLE.open())] if TABLE.exists() else []
    known = {tuple(row[key] for key in COLUMNS[:3]) for row in rows}
    for key in rows_to_make(flags.only):
        if key in known:
            continue
        found = measure(read_model(key[0]), *key)
        rows.append(dict(zip(COLUMNS, key, strict=False)) | found)
        print(os.linesep, *key, found, flush=True)
        lines = [[row.get(column, "") for column in COLUMNS] for row in rows]
        write_whole(epath.Path(TABLE), as_csv([list(COLUMNS), *lines]))


if __name__ == "__main__":
    main()
