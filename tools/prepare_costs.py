"""CPU seconds of vit_jax, img2dataset and TFDS for one set: docs/how_to/prepare_costs.csv.

python tools/prepare_costs.py WORKDIR --data_dir=DIR --img2dataset=PROGRAM [--rounds=3]

DIR holds imagenet_sample/VERSION, 500 photographs of ImageNet's size. One process prepares four
copies of each, first as they are, then with a shorter side of 256 pixels. PROGRAM is img2dataset
in an environment of its own, as it needs older packages; a thread of this tool serves the pictures
to it, and its time does not count. The builder of TFDS resizes with Pillow and does not decode the
files that it keeps. Rows have the median of the rounds, with the time to start.
"""

import argparse
import functools
import http.server
import io
import multiprocessing
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import threading

import PIL.Image
import tensorflow_datasets as tfds
from measured_runs import ROOT, add_row

TABLE = ROOT / "docs/how_to/prepare_costs.csv"
COPIES = 4


class Photos(tfds.core.GeneratorBasedBuilder):
    """The pictures of a folder, each with its class; `side`: of larger ones, in pixels."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, images: pathlib.Path, side: int | None, **keys):
        self._images, self._side = images, side
        super().__init__(**keys)

    def _info(self):
        names = sorted(path.name for path in self._images.iterdir())
        columns = {"image": tfds.features.Image(encoding_format="jpeg"),
                   "label": tfds.features.ClassLabel(names=names)}  # fmt: skip
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(columns))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for path in sorted(self._images.glob("*/*")):
            image = str(path) if self._side is None else shrunk(path, self._side)
            yield f"{path.parent.name}/{path.name}", {"image": image, "label": path.parent.name}


def shrunk(path: pathlib.Path, side: int) -> io.BytesIO:
    image, file = PIL.Image.open(path).convert("RGB"), io.BytesIO()
    if (scale := side / min(image.size)) < 1:
        size = round(image.width * scale), round(image.height * scale)
        image = image.resize(size, PIL.Image.BICUBIC)
    image.save(file, "JPEG", quality=95)
    file.seek(0)
    return file


def build(images: pathlib.Path, side: int | None, output: pathlib.Path) -> None:
    Photos(images, side, data_dir=output, file_format="array_record").download_and_prepare()


def write_photos(data_dir: str, images: pathlib.Path) -> None:
    """Write the files of the photographs, in ten folders."""
    keys = {"split": "train", "decoders": {"image": tfds.decode.SkipDecoding()}}
    found = tfds.as_numpy(tfds.load("imagenet_sample", data_dir=data_dir, **keys))
    for place, example in enumerate(found):
        for copy in range(COPIES):
            path = images / f"class{place % 10}/{place:04}_{copy}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(example["image"])


def serve(images: pathlib.Path, urls: pathlib.Path) -> None:
    """Serve the files at the addresses that are written to `urls`."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=images)
    handler.func.log_message = lambda *_: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    names = [path.relative_to(images) for path in sorted(images.glob("*/*"))]
    urls.write_text("".join(f"http://127.0.0.1:{server.server_port}/{name}\n" for name in names))


def prepare(by: str, side: int | None, work: pathlib.Path, img2dataset: str) -> float:
    """CPU seconds of one preparation."""
    images, output = work / "train_of", work / "output"
    shutil.rmtree(output, ignore_errors=True)
    start = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    if by == "TFDS":
        spawn = multiprocessing.get_context("spawn")
        job = spawn.Process(target=build, args=(images / "train", side, output))
        job.start()
        job.join()
        assert job.exitcode == 0
        return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - start
    command = [sys.executable, "-m", "vit_jax.main", "prepare", "folder", "--splits=train",
               f"--config.data.data_dir={images}", f"--output={output}", "--workers=1"]  # fmt: skip
    if by == "img2dataset":
        resize = ["--resize_mode=no"] if side is None else ["--resize_mode=keep_ratio"]
        command = [img2dataset, f"--url_list={work / 'urls.txt'}", f"--output_folder={output}",
                   "--output_format=webdataset", "--processes_count=1", "--thread_count=8",
                   "--encode_quality=95", "--resize_only_if_bigger=True",
                   *resize]  # fmt: skip
    sides = {"vit_jax": f"--side={side}", "img2dataset": f"--image_size={side}"}
    subprocess.run([*command, *[sides[by]] * (side is not None)], check=True, cwd=ROOT,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("--data_dir", required=True, help="holds imagenet_sample/VERSION")
    parser.add_argument("--img2dataset", required=True, metavar="PROGRAM")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    work = args.workdir.resolve()
    write_photos(args.data_dir, work / "train_of/train")
    serve(work / "train_of/train", work / "urls.txt")
    TABLE.unlink(missing_ok=True)
    for side in (None, 256):
        used = {by: [] for by in ("vit_jax", "img2dataset", "TFDS")}
        for _ in range(args.rounds):
            for by, seconds in used.items():
                seconds.append(prepare(by, side, work, args.img2dataset))
                print(side, by, round(seconds[-1], 1), flush=True)
        cells = {by: round(statistics.median(seconds), 1) for by, seconds in used.items()}
        add_row(TABLE, {"side": side or "", **cells})


if __name__ == "__main__":
    main()
