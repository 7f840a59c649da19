"""What other formats are compared with: records of CIFAR-10 as TFDS prepares them."""

import numpy as np

from vit_jax.data import make_source
from vit_jax.data.host_tf import tf


def read_300_records(shared_data):
    """(source, encoded images, labels) of some of its records, of two files."""
    how = {"split": "test[4900:5200]", "data_dir": str(shared_data), "image_size": (32, 32)}
    source = make_source("cifar10", **how, reader="offsets")
    examples = [*tf.data.Dataset.range(300).map(source.read).as_numpy_iterator()]
    images = [example["image"] for example in examples]
    return source, images, [int(example["label"]) for example in examples]


def check_parts(batches, hosts):
    """Each batch is made of the batches of the hosts."""
    for batch, *parts in zip(batches, *hosts, strict=True):
        for key, value in batch.items():
            found = np.concatenate([part[key] for part in parts])
            np.testing.assert_array_equal(found, value, err_msg=key)
