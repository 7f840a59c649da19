"""TensorFlow as the input pipeline uses it: imported at first use, quiet, on the CPU only.

Every module of this package takes `tf` and `tfds` from here, so that TensorFlow never sees (nor
takes the memory of) an accelerator that JAX computes on, and `import vit_jax.data` stays cheap.
"""

import os

from etils import epy

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # broken records are named by us
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # one order of summation; no start-up notice


def _hide_accelerators(module_name: str) -> None:
    del module_name
    import tensorflow  # the module itself: `tf` below is still being resolved

    for kind in ("GPU", "TPU"):
        tensorflow.config.set_visible_devices([], kind)


with epy.lazy_imports(success_callback=_hide_accelerators):
    import tensorflow as tf
    import tensorflow_datasets as tfds

__all__ = ["tf", "tfds"]
