"""The section `data` of a config: the training data, and what a batch holds of them."""

from vit_jax.base.errors import Faults
from vit_jax.config.drawn import TOKENS
from vit_jax.config.parts import LARGEST_SIDE, POSITIVE, SHARE, OpenSection, key
from vit_jax.config.sizes import EXAMPLE

Size = tuple[int, int]


class Data(OpenSection):
    """The training data and what a batch holds of it."""

    name: str = key(
        None,
        "digits, folder, parquet, synthetic, hf:OWNER/NAME, vtab/TASK, or a TFDS data set",
        decided=True,
    )
    split: str = key("train", "training split; TFDS also takes a slice, train[:90%]")
    data_dir: str | None = key(None, "None: TFDS's default folder")
    exif: bool = key(True, "turn your own images by their EXIF orientation")
    pixel_range: tuple[float, ...] | None = key(
        None, "values of 16- and 32-bit files that become 0 and 255; None: the high byte of 16 bits"
    )
    decoding: int = key(
        2, "version of how files become pixels; 1: as in 0.2.0", within="[1, 2]", before=1
    )
    image_size: Size = key(
        None,
        f'int or (height, width), in pixels; or a schedule, "{EXAMPLE}"',
        form="sizes",
        decided=True,
    )
    image_size_keeps: str = key(
        "batch",
        "in a schedule of sizes, batch: each step has global_batch_size images; tokens: steps of "
        "smaller images have more of them, with about as many patches",
        choices=("batch", "tokens"),
    )
    max_tokens: int | None = key(
        None, "pictures keep their shape, each sized to fill at most so many patches, or a number "
        f'drawn for each step, "{TOKENS}"; None: all have data.image_size', form="draws",
    )  # fmt: skip
    pack: tuple[int, ...] | None = key(
        None, "in training a row of tokens holds several pictures, sized to fill at most so many "
        "patches each, such as 64,64,128,256; None: a row is one picture", within=POSITIVE,
    )  # fmt: skip
    patch_size: Size | None = key(None, "of the model, set by the run with data.max_tokens")
    channels: int = key(3, "of the model's images: 1 is grey, 4 as in RGBA files", within=POSITIVE)
    num_classes: int = key(None, "None: taken from the data set", within=POSITIVE, decided=True)
    exclude: str | None = key(None, "FILE.npz of `duplicates`, records to leave out; None: none")
    classes: tuple[int, ...] | None = key(None, "labels to keep, renumbered from 0; None: all")
    subset: str | None = key(
        None,
        'a part of the training data, "1000" images or "10%" of them; for each subset_seed a '
        "smaller part is within every larger one; or a file of `curate`, FILE.npz; None: all",
    )
    subset_balanced: bool = key(False, "the same number of each class, as far as it has so many")
    subset_seed: int = key(0, "of the draw")
    multi_label: bool = key(False, "whether an image may have several labels, or none")
    soft_labels: bool = key(
        False, "train on probabilities of classes, as soft pseudo labels; others become 0 and 1"
    )
    num_examples: int = key(
        None, "size of the training data; a mixture counts all its data sets. One epoch has so "
        "many examples; data.repeats and the weights in data.mix do not change that. None: taken "
        "from the data", within=POSITIVE, decided=True,
    )  # fmt: skip
    mix: str = key(
        "",
        '"NAME=WEIGHT, NAME@SPLIT=WEIGHT", or a list of dicts with name, weight, and, where they '
        "differ from the section's, data_dir and split; data.name gets the remaining weight",
    )
    order: str = key(
        None,
        "None: chunk for >= 100 million examples, and for Parquet above 1 GiB",
        choices=("record", "chunk"),
        decided=True,
    )
    chunk_size: int = key(
        None, "consecutive records that `chunk` reads together; None: a row group of Parquet, or "
        "64", within=POSITIVE, decided=True,
    )  # fmt: skip
    streams: int | None = key(
        None, "parallel streams of `chunk`; None: up to 256, by batch size and row groups",
        within=POSITIVE,
    )  # fmt: skip
    repeats: int = key(1, "views of each record in a batch (arXiv:1901.09335)", within=POSITIVE)
    reader: str | None = key(
        None, "of TFDS data sets; None: by size", choices=("memory", "offsets", "array_record")
    )
    max_corrupt_fraction: float = key(
        0.1, "of the examples so far; the run stops above it", within=SHARE
    )
    ops: str = key(
        "", 'training ops, augmentation included: "decode|resize|flip" and so on', form="ops"
    )
    num_global: int = key(
        0,
        "views of data.image_size that a batch has of each image, for objectives that learn "
        "from several; with views and without data.ops, a batch has no other image",
        within="[0, 511]",
    )
    global_ops: str = key(
        "", 'their ops; for each view, joined by ";", where they differ: the last hold for all '
        "that follow", form="ops",
    )  # fmt: skip
    num_local: int = key(0, "views of data.local_size", within="[0, 511]")
    local_ops: str = key("", "their ops, as in data.global_ops", form="ops")
    local_size: Size | None = key(None, "int or (height, width), in pixels")
    text_length: int | None = key(None, "tokens of a caption; None: none are read", within=POSITIVE)
    tokenizer: str | None = key(
        None, "of captions: a folder, its spiece.model or tokenizer.json, or hf:OWNER/NAME; None: "
        "init_from's, where it has a text tower, or the run trains one"
    )  # fmt: skip
    vocabulary: int | None = key(None, "token ids; None: as the tokenizer has", within=POSITIVE)
    vocabulary_digest: str | None = key(None, "of its files, set by the run")
    keep_features: bool = key(False, "train on features by the frozen model, computed once")
    mean: tuple[float, ...] = key((0.5, 0.5, 0.5), "the model gets (image / 255 - mean) / std")
    std: tuple[float, ...] = key((0.5, 0.5, 0.5), "see data.mean")

    def check(self) -> list[str]:
        faults = Faults()
        faults.need(
            not self.num_local or self.local_size is not None,
            f"local_size=None: needs a positive int or a pair of them, up to {LARGEST_SIDE}",
        )
        faults.need(
            not self.num_local or self.num_global,
            f"num_local={self.num_local}: needs global views too; set --config.data.num_global=2",
        )
        faults.need(
            self.tokenizer is None or self.text_length is not None,
            f"tokenizer={self.tokenizer!r}: reads nothing with data.text_length=None; set "
            "--config.data.text_length=64",
        )
        faults.need(
            not (self.soft_labels and self.multi_label),
            "soft_labels=True: excludes data.multi_label=True; set one of them to false",
        )
        limits = self.pixel_range
        faults.need(
            limits is None or (len(limits) == 2 and limits[0] < limits[1]),
            f"pixel_range={limits}: needs LOW,HIGH with LOW < HIGH, such as 0,4095",
        )
        number = f"{self.channels} numbers, one per channel, or 1 for all,"
        number = "1 number" if self.channels == 1 else number
        for name, values in {"mean": self.mean, "std": self.std}.items():
            alike = len(values) in (1, 3) and (self.channels == 1 or len({*values}) == 1)
            positive = name == "mean" or all(value > 0 for value in values)
            faults.need(
                (len(values) == self.channels or alike) and positive,
                f"{name}={values}: needs {number} for pixels in [0, 1]"
                f"{', above 0' if name == 'std' else ''}",
            )
        return faults
