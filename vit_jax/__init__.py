"""Pretrain Vision Transformers at TPU scale and transfer them to new tasks.

    model = vit_jax.create_model("ViT-B/16", num_classes=10, image_size=32)
    model, variables = vit_jax.load_pretrained("ViT-B_16.npz")
    logits = model.apply(variables, images, train=False)

    summary = vit_jax.train("quickstart", "runs/quickstart")
    results = vit_jax.evaluate("runs/quickstart")
    rows = vit_jax.predict(["cat.jpg", image, array], "runs/mine")

docs/how_to/python.md shows the other functions.

Importing this package touches no device, parses no flag and does not import TensorFlow.
"""

import importlib
import platform
import sys
from typing import Any

if sys.version_info < (3, 11):  # noqa: UP036 (python_requires binds only pip)
    raise SystemExit(
        f"vit_jax needs Python 3.11 or newer; this is {platform.python_version()}, {sys.executable}"
    )

__version__ = "0.2.0"

_HOMES = {
    "branch": "vit_jax.run.setup.branch",
    "compare": "vit_jax.api",
    "create_model": "vit_jax.models",
    "evaluate": "vit_jax.api",
    "export": "vit_jax.transfer.export",
    "figures": "vit_jax.api",
    "load_config": "vit_jax.run.setup.validation",
    "load_image": "vit_jax.transfer.pretrained",
    "load_predictor": "vit_jax.inference.predict",
    "load_pretrained": "vit_jax.transfer",
    "plan": "vit_jax.api",
    "predict": "vit_jax.inference.predict",
    "pretrained_spec": "vit_jax.transfer",
    "read_metrics": "vit_jax.api",
    "read_pretrained": "vit_jax.transfer",
    "save_pretrained": "vit_jax.transfer",
    "search": "vit_jax.inference.neighbours",
    "study": "vit_jax.api",
    "train": "vit_jax.api",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vit_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
