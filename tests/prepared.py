"""Writes small data sets as TFDS prepares them, and damages their files."""

from vit_jax.data.host_tf import tf, tfds
from vit_jax.data.records import record_offsets


def labelled_images(num_classes, **image):
    """TFDS's features of images with one label each; `image`: the arguments of its Image."""
    label = tfds.features.ClassLabel(num_classes=num_classes)
    return {"image": tfds.features.Image(**image), "label": label}


def prepare(root, name, features, examples, version="1.0.0", examples_per_shard=100, **how):
    """Write the split `train` of a data set to root/name/version."""
    identity = tfds.core.dataset_info.DatasetIdentity(
        name=name,
        version=tfds.core.Version(version),
        data_dir=str(root / name / version),
        module_name=__name__,
    )
    (root / name / version).mkdir(parents=True)
    features = tfds.features.FeaturesDict(features)
    info = tfds.core.DatasetInfo(builder=identity, features=features)
    writer = tfds.core.SequentialWriter(info, max_examples_per_shard=examples_per_shard, **how)
    writer.initialize_splits(["train"])
    writer.add_examples({"train": examples})
    writer.close_all()


def flip_a_byte(path, record):
    """Flip a bit of a record, so that its checksum is wrong."""
    (offsets,) = record_offsets([path])
    content = bytearray(path.read_bytes())
    content[(offsets[record] + offsets[record + 1]) // 2] ^= 4
    path.write_bytes(content)


def break_image(path, record):
    """Truncate the image of a record; the record's checksum stays right."""
    examples = [bytes(r.numpy()) for r in tf.data.TFRecordDataset(str(path))]
    example = tf.train.Example.FromString(examples[record])
    image = example.features.feature["image"].bytes_list
    image.value[0] = image.value[0][:150]
    examples[record] = example.SerializeToString()
    with tf.io.TFRecordWriter(str(path)) as writer:
        for serialized in examples:
            writer.write(serialized)
