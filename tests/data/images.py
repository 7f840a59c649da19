"""Images for tests."""

import io

import numpy as np
import PIL.Image


def smooth_image(height=60, width=90, seed=0):
    """Coarse noise, enlarged so that JPEG changes it little: uint8 (height, width, 3)."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 9, 3), np.uint8)
    return np.asarray(PIL.Image.fromarray(noise).resize((width, height), PIL.Image.BICUBIC))


def encode(image, file_format="JPEG", mode=None, **options):
    """The encoded bytes of uint8 `image`, after conversion to PIL's `mode`."""
    image = PIL.Image.fromarray(image)
    buffer = io.BytesIO()
    (image.convert(mode) if mode else image).save(buffer, file_format, **options)
    return buffer.getvalue()


def pil_rgb(encoded):
    """Decode `encoded` with PIL: uint8 (h, w, 3)."""
    return np.asarray(PIL.Image.open(io.BytesIO(encoded)).convert("RGB"))


def make_folder(root, sizes):
    """Write sizes[class] different JPEGs to root/class/0.jpg, 1.jpg, ...; return `root`."""
    for c, (class_name, size) in enumerate(sizes.items()):
        (root / class_name).mkdir(parents=True)
        for i in range(size):
            encoded = encode(smooth_image(seed=1000 * c + i))
            (root / class_name / f"{i}.jpg").write_bytes(encoded)
    return root
