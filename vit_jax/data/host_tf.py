"""TensorFlow for the input pipeline: imported at first use, quiet, on the CPU only.

Every module of this package imports `tf` and `tfds` from here. TensorFlow then never sees, or
allocates memory on, an accelerator that JAX uses, and `import vit_jax.data` stays cheap.
"""

import os

from etils import epy

if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # JAX's import sets it to 1
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # loading.py warns of broken records itself
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # one order of summation; no start-up notice
# Of gs:// fetch what is read, not 64 MiB for each record.
if not any(name.startswith("GCS_READ_CACHE") for name in os.environ):
    os.environ["GCS_READ_CACHE_BLOCK_SIZE_MB"] = "0"

# Importing TensorFlow loads Keras, which takes a quarter of the time and is not used here. While
# TF_USE_LEGACY_KERAS is set, TensorFlow looks for the legacy Keras, which is rarely installed, and
# skips the load. Unset afterwards, `tf.keras` works as usual.
_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"
_unset = _LEGACY_KERAS not in os.environ
os.environ.setdefault(_LEGACY_KERAS, "1")


def _when_imported(module_name: str) -> None:
    del module_name
    import tensorflow  # the module itself; `tf` below is not yet resolved

    if _unset:
        os.environ.pop(_LEGACY_KERAS, None)
    for kind in ("GPU", "TPU"):
        tensorflow.config.set_visible_devices([], kind)


with epy.lazy_imports(success_callback=_when_imported):
    import tensorflow as tf
    import tensorflow_datasets as tfds

__all__ = ["tf", "tfds"]
