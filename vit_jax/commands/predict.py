"""Classify images, write captions, search folders, or save features.

  python -m vit_jax.main predict --init_from=runs/mine cat.jpg IMAGES/
  python -m vit_jax.main predict --init_from=ViT-B_16.npz --features=digits.npz --data=digits:test
  python -m vit_jax.main predict --init_from=runs/words --neighbours=IMAGES --text="a red car"

Images are files, or folders whose images (JPEG, PNG, WebP, BMP, GIF, TIFF) are read at any depth.
--data=NAME:SPLIT reads a data set instead, from --data_dir. Classes are printed as a table, as JSON
lines with --format=json, or with --format=csv for a spreadsheet, a row for each image. They have
names if the model comes with class names; 1,000 classes without names are assumed to be ImageNet's.
Images that are missing or cannot be read are reported, all others are predicted, and the exit code
is 1.

If the model's run had images with several labels, every class is printed whose probability reaches
a threshold. It is 1/2; --thresholds gives another number, or the classes.csv that
`evaluate --output` wrote, with a threshold for each class.

--labels="a cat,a dog,nothing" classifies by words of yours, with any model that has a text tower:
CLIP, SigLIP, SigLIP 2. Each label is put into several prompts; --prompts=FILE has others, one a
line, with {} for the label. It needs: pip install -e '.[text]'

--features=FILE.npz saves the features before the head, or with --tokens=patches the features of
every patch.

For many images, --output=DIR writes the classes as Parquet files, and --features=DIR the features
as arrays of float16 with Parquet files of their names. Several processes share the work if a
launcher starts them. After an interruption, run the same command again: finished files are kept.

--captions writes the most probable caption of each image, with a run of --config=captions:folder.
--beams=4 searches further, and --top=3 then prints the three most probable.

--neighbours=FOLDER prints, instead of classes, the --top images of a folder that are most like
each image, with the cosine of the angle between their features; --sheet=FILE.png shows them.
--text="a red car" asks in words, with any model that has a text tower. The features of the folder
are kept beside it, as FOLDER.DIGEST.index.npz, so that the next question is answered at once.
"""

import argparse
import csv
import itertools
import json
import pathlib
import signal
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vit_jax.base import files
from vit_jax.base.errors import Faults, collect_faults, shown
from vit_jax.commands.flags import (
    define_format_flag,
    define_image_flags,
    define_process_flags,
    define_source_flags,
    open_source,
    positive_int,
    read_source,
    start_job,
)
from vit_jax.devices.mesh import start_backend
from vit_jax.insight.tables import as_csv
from vit_jax.job import exit_codes

if TYPE_CHECKING:
    from vit_jax.data import Source
    from vit_jax.transfer import Pretrained

_OF_JOBS = ("coordinator", "num_processes", "process_id", "num_devices")


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_source_flags(parser)
    define_image_flags(parser, batch_size=64)
    parser.add_argument("--labels", metavar="WORDS", help="classes in words: 'a cat,a dog,nothing'")
    parser.add_argument("--prompts", metavar="FILE", help="texts with {} for a label, one a line")
    parser.add_argument(
        "--output", metavar="DIR", help="folder of Parquet files to write, for many images"
    )
    parser.add_argument("--features", metavar="PATH", help=".npz file or folder to write")
    parser.add_argument(
        "--tokens", default="pooled", choices=("pooled", "patches"), help="features to save"
    )
    parser.add_argument(
        "--read_as", choices=("labels", "captions"),
        help="reads --data for --features as a new run on labels or captions does, whose records "
        "`curate` chooses; default: with the classes and the division of the model",
    )  # fmt: skip
    parser.add_argument("--captions", action="store_true", help="write captions")
    parser.add_argument(
        "--beams", type=positive_int, default=1, help="of the search for captions; 1: greedy"
    )
    parser.add_argument("--neighbours", metavar="FOLDER", help="print its most similar images")
    parser.add_argument(
        "--text", metavar="WORDS", action="append", default=[], help="asks --neighbours in words"
    )
    parser.add_argument(
        "--image", metavar="FILE", action="append", default=[], help="same as IMAGE"
    )
    parser.add_argument("--sheet", metavar="FILE", help=".png file of these images to write")
    define_format_flag(parser, "csv")
    parser.add_argument(
        "--top", type=positive_int, help="classes, neighbours or captions to print per image; "
        "default: 5, or 1 caption, or all classes above their thresholds",
    )  # fmt: skip
    parser.add_argument(
        "--thresholds", metavar="FILE", help="smallest probability to print, or a classes.csv"
    )
    define_process_flags(parser)


class _Given(NamedTuple):
    """The images of the command line: their paths, and {path: fault} of what gives none."""

    paths: list[str]
    faults: dict[str, str]

    @property
    def absent(self) -> list[dict[str, str]]:
        return [{"file": path, "error": fault} for path, fault in self.faults.items()]


def main(flags: argparse.Namespace) -> int:
    flags.images += flags.image
    task = _check_flags(flags)

    from vit_jax.run import terminal  # heavy imports only after the flags are checked

    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    _start(flags)
    given, labels, prompts = _read_inputs(flags)
    pretrained = read_source(flags)
    if labels:
        from vit_jax.inference.labels import with_labels

        pretrained = with_labels(pretrained, labels, prompts)
    return _TASKS[task].run(flags, pretrained, given)


def _read_inputs(
    flags: argparse.Namespace,
) -> tuple[_Given, tuple[str, ...] | None, tuple[str, ...]]:
    """The images, the labels and the prompts; flags with files to write become paths.

    Raises:
      InputError: names all files that are wrong, before a large model is read.
    """
    from vit_jax.data.images.given import find_images, search_images
    from vit_jax.data.words import read_prompts
    from vit_jax.inference import saved

    given, wrong = _Given(*([], {}) if flags.data else search_images(flags.images)), Faults()
    if folder := folder_flag(flags):
        place = files.absolute(getattr(flags, folder))
        setattr(flags, folder, place)
        wrong.check(files.check_folder, place, f"--{folder}")
    for name, suffix in (("features", ".npz"), ("sheet", ".png")):
        if (output := getattr(flags, name)) and name != folder:
            setattr(flags, name, wrong.check(saved.check_output, output, f"--{name}", suffix))
    if flags.neighbours:
        wrong.check(find_images, [flags.neighbours])
    labels = None if flags.labels is None else wrong.check(_read_labels, flags.labels)
    prompts = wrong.check(read_prompts, flags.prompts, "--prompts")
    if not given.paths:
        wrong += [f"{path}: {fault}" for path, fault in given.faults.items()]
    collect_faults(wrong)
    return given, labels, prompts or ()


def _save_features(flags: argparse.Namespace, pretrained: "Pretrained", given: _Given) -> int:
    source = open_source(flags, pretrained, given.paths, flags.read_as)
    what = {"pooled": "features", "patches": "dense"}[flags.tokens]
    return _write(flags, pretrained, source, given, what)


def _search(flags: argparse.Namespace, pretrained: "Pretrained", given: _Given) -> int:
    from vit_jax.inference import neighbours

    top, asked = flags.top or 5, (flags.neighbours, flags.text, given.paths)
    found = neighbours.nearest(pretrained, *asked, top=top, batch_size=flags.batch_size)
    rows = [*found, *given.absent]
    code = _print_rows(rows, flags.format, top, _NEIGHBOURS)
    if flags.sheet:
        neighbours.write_sheet(flags.sheet, rows, pretrained.spec.reading)
    return code


def _caption(flags: argparse.Namespace, pretrained: "Pretrained", given: _Given) -> int:
    from vit_jax.inference.captions import write_captions

    source, top = open_source(flags, pretrained, given.paths), flags.top or 1
    how = {"batch_size": flags.batch_size, "beams": flags.beams, "top": top}
    rows = itertools.chain(write_captions(pretrained, source, **how), given.absent)
    return _print_rows(rows, flags.format, top, _CAPTIONS)


def _classify(flags: argparse.Namespace, pretrained: "Pretrained", given: _Given) -> int:
    from vit_jax.inference.outputs import check_classes
    from vit_jax.inference.predict import classify, read_thresholds

    source = open_source(flags, pretrained, given.paths)
    check_classes(pretrained)  # before the first line of output
    run, least, top = pretrained.run, flags.thresholds, flags.top
    if least is None and top is None and run and run["config"]["data"]["multi_label"]:
        least = "0.5"
    thresholds = 0.0 if least is None else read_thresholds(least, pretrained)
    top = top or (5 if least is None else None)
    if flags.output:
        return _write(flags, pretrained, source, given, "classes", top=top, thresholds=thresholds)
    how = {"top": top, "thresholds": thresholds, "batch_size": flags.batch_size}
    rows = itertools.chain(classify(pretrained, source, **how), given.absent)
    num_columns = min(top or 1, pretrained.model.num_classes or 1) if least is None else None
    return _print_rows(rows, flags.format, num_columns)


def folder_flag(flags: argparse.Namespace) -> str | None:
    """The flag whose value is a folder for parts, which several processes may write."""
    features = flags.features is not None and not pathlib.Path(flags.features).suffix
    return "output" if flags.output else "features" if features else None


def _start(flags: argparse.Namespace) -> None:
    """Start JAX, in a job of several processes if there is a folder for parts."""
    if folder_flag(flags) is None:
        start_backend()
        return
    from vit_jax.config import base_config

    start_job(flags, base_config())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # every part is written whole


def _write(
    flags: argparse.Namespace,
    pretrained: "Pretrained",
    source: "Source",
    given: _Given,
    what: str,
    **choice: Any,
) -> int:
    """Write predictions or features to files, print a summary, and return the exit code."""
    import jax

    from vit_jax.inference import saved

    how = {"batch_size": flags.batch_size, "what": what}
    if name := folder_flag(flags):
        folder = getattr(flags, name)
        written = saved.write_predictions(pretrained, source, folder, f"--{name}", **how, **choice)
    else:
        written = saved.write_features(pretrained, source, flags.features, **how)
    if jax.process_index() == 0:
        for path, fault in given.faults.items():
            print(f"error: {path}: {fault}", file=sys.stderr)
        print(json.dumps(written))
    why = []
    if written["unreadable"]:
        where = "`error` in the table" if name else "`valid` in the file"
        why.append(f"unreadable images: {written['unreadable']} (see {where})")
    if given.faults:
        first = next(f"{path}: {fault}" for path, fault in given.faults.items())
        why.append(f"paths without images: {len(given.faults)}, such as {first}")
    if not why:
        return exit_codes.DONE
    # On every process: a launcher shows the last lines of the one that ends first.
    place = getattr(flags, name or "features")
    print(f"error: {'; '.join(why)}; all other images are in {place}", file=sys.stderr)
    return exit_codes.FAILED


def _check_flags(flags: argparse.Namespace) -> str:
    """The task that the flags ask for; raises one InputError that lists all faults."""
    faults = Faults()
    asked = [task for task in ("features", "neighbours", "captions") if getattr(flags, task)]
    faults.need(len(asked) < 2, f"--{' --'.join(asked)}: give one of them")
    task = asked[0] if asked else "classes"
    prints = task != "features" and not flags.output
    faults.need(prints or flags.format == "table", "--format: nothing is printed; leave it out")
    for flag, default in _DEFAULTS.items():
        of = [name for name, known in _TASKS.items() if flag in known.flags]
        faults.need(
            task in of or len(asked) > 1 or getattr(flags, flag) == default,
            f"--{flag}: goes with {' or '.join(of)}, not with {task}; leave it out",
        )
    faults.need(
        bool(flags.images or (flags.neighbours and flags.text)) != bool(flags.data),
        "give either images (files, folders) or --data=NAME:SPLIT",
    )
    faults.need(
        not flags.neighbours or flags.images or flags.text,
        "--neighbours: needs images (files, folders), or --text=WORDS",
    )
    several = any(getattr(flags, name) is not None for name in _OF_JOBS)
    faults.need(
        not several or folder_flag(flags),
        "several processes: they need a folder to share, --output=DIR or --features=DIR",
    )
    faults.need(
        not pathlib.Path(flags.output or "").suffix,
        f"--output={flags.output}: needs a folder; for one table, write --format=csv > FILE",
    )
    faults.need(flags.prompts is None or flags.labels, "--prompts: needs --labels=WORDS")
    faults.need(
        not flags.data or flags.features or flags.output,
        "--data: needs --output=DIR or --features=FILE.npz; to score a data set, use evaluate",
    )
    faults.need(
        task != "captions" or (flags.top or 1) <= flags.beams,
        f"--top={flags.top}: the search keeps as many captions as --beams; set --beams={flags.top}",
    )
    faults.need(
        flags.read_as is None or flags.data or task != "features",
        "--read_as: needs --data=NAME:SPLIT; files have no labels",
    )
    collect_faults(faults)
    return task


def _read_labels(text: str) -> tuple[str, ...]:
    """The labels of --labels, checked; one with a comma stands in double quotes."""
    from vit_jax.data.words import check_labels

    return check_labels(next(csv.reader([text], skipinitialspace=True), []), "--labels")


class _Found(NamedTuple):
    """The words printed for each image: a list in its row, and the words for it.

    key, name, value: of the list in a row, and of its items.
    word: the column of the names.
    """

    key: str
    word: str
    name: str
    value: str
    form: str


_CLASSES = _Found("classes", "class", "name", "probability", "{:.1%}")
_NEIGHBOURS = _Found("neighbours", "neighbour", "file", "similarity", "{:.4f}")
_CAPTIONS = _Found("captions", "caption", "caption", "log_probability", "{:.2f}")


def _print_rows(
    rows: Iterable[dict[str, Any]], format: str, num_columns: int | None, what: _Found = _CLASSES
) -> int:
    """Print `rows` as a table, JSON lines or CSV; return the exit code.

    `num_columns`: items of each row of CSV; None: differs, so all are in one cell.
    """
    num_errors, table = 0, Table("image", what.word, what.value)
    if format == "csv":
        numbers = ["", *(f"_{i}" for i in range(2, (num_columns or 1) + 1))]
        names = (what.word, what.value) if num_columns else ("labels", "probabilities")
        head = ["file", *(f"{name}{i}" for i in numbers for name in names), "error"]
        print(as_csv([head]).decode(), end="")
    for row in rows:
        num_errors += "error" in row
        found, asked = row.get(what.key, []), row["file" if "file" in row else "text"]
        if format == "csv":
            pairs = [(one[what.name], f"{one[what.value]:.6g}") for one in found]
            cells = [cell for pair in pairs for cell in pair]
            if num_columns is None:
                cells = [*map(";".join, zip(*pairs, strict=True))]
            cells += [""] * (2 * (num_columns or 1) - len(cells))
            print(as_csv([[asked, *cells, row.get("error")]]).decode(), end="")
        elif format == "json":
            print(json.dumps(row, ensure_ascii=False))
        else:
            file = Text(shown(asked), overflow="fold")  # the end of a path counts
            if not found:
                table.add_row(file, Text(row.get("error", "none")), "")
            for i, one in enumerate(found):
                name = Text(shown(one[what.name]), overflow="fold")
                table.add_row("" if i else file, name, what.form.format(one[what.value]))
    if format == "table":
        Console().print(table)
    return exit_codes.FAILED if num_errors else exit_codes.DONE


class _Task(NamedTuple):
    run: Callable[[argparse.Namespace, "Pretrained", _Given], int]
    flags: tuple[str, ...]


_TASKS = {  # {task: what does it, and the flags that not all tasks use}
    "classes": _Task(_classify, ("labels", "prompts", "output", "top", "thresholds")),
    "features": _Task(_save_features, ("tokens", "read_as")),
    "neighbours": _Task(_search, ("text", "sheet", "top")),
    "captions": _Task(_caption, ("beams", "top")),
}
_DEFAULTS = {flag: None for task in _TASKS.values() for flag in task.flags} | {
    "tokens": "pooled", "text": [], "beams": 1,
}  # fmt: skip
