"""TensorFlow as the input pipeline uses it: imported at first use, quiet, on the CPU only.

Every module of this package takes `tf` and `tfds` from here, so that TensorFlow never sees (nor
takes the memory of) an accelerator that JAX computes on, and `import vit_jax.data` stays cheap.
"""

import os

from etils import epy

if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # which JAX sets when it is imported
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # broken records are named by us
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # one order of summation; no start-up notice

# TensorFlow loads Keras when it is imported, a quarter of its time, and nothing here uses it. Sent
# after the legacy one, which is rarely there, it does not; afterwards `tf.keras` is as ever.
_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"
_unset = _LEGACY_KERAS not in os.environ
os.environ.setdefault(_LEGACY_KERAS, "1")


def _when_imported(module_name: str) -> None:
    del module_name
    import tensorflow  # the module itself: `tf` below is still being resolved

    if _unset:
        os.environ.pop(_LEGACY_KERAS, None)
    for kind in ("GPU", "TPU"):
        tensorflow.config.set_visible_devices([], kind)


with epy.lazy_imports(success_callback=_when_imported):
    import tensorflow as tf
    import tensorflow_datasets as tfds

__all__ = ["tf", "tfds"]
