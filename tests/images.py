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


def write_images(root, images):
    """Write {name: the bytes of a file, or pixels for a PNG} below `root`; return `root`."""
    for name, image in images.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(image if isinstance(image, bytes) else encode(image, "PNG"))
    return root


def make_folder(root, sizes):
    """Write sizes[class] different JPEGs to root/class/0.jpg, 1.jpg, ...; return `root`."""
    return write_images(root, {
        f"{class_name}/{i}.jpg": encode(smooth_image(seed=1000 * c + i))
        for c, (class_name, size) in enumerate(sizes.items())
        for i in range(size)
    })  # fmt: skip
