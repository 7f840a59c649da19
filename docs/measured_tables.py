"""Tables of measurements: docs/hooks.py makes Markdown of the CSV files in docs/."""

import csv
import pathlib
import statistics

ROOT = pathlib.Path(__file__).resolve().parents[1]


def cell(text: str) -> str:
    """`text` in a table: a pipe outside of code would begin the next cell."""
    parts = text.split("`")
    return "`".join([part.replace("|", "&#124;") if i % 2 == 0 else part
                     for i, part in enumerate(parts)])  # fmt: skip


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(map(cell, row)) + " |" for row in rows)])


def rows_of(path: str) -> list[dict]:
    """The rows of a CSV file, whose path is from ROOT."""
    with open(ROOT / path) as file:
        return [*csv.DictReader(file)]


def runs_of(path: str, *columns: str) -> dict[tuple[str, ...], list[dict]]:
    """{values of `columns`: the rows of a CSV file with them}, in the order of the file."""
    found: dict[tuple[str, ...], list[dict]] = {}
    for row in rows_of(path):
        found.setdefault(tuple(row[column] for column in columns), []).append(row)
    return found


def seeds_of(runs: list[dict]) -> str:
    return ", ".join(row["seed"] for row in runs)


def goodput() -> str:
    """A row for each kind of run of docs/explanation/goodput.csv: means over its runs."""

    def mean(column: str, form: str) -> str:
        found = [float(row[column]) for row in runs if row[column]]
        return format(statistics.mean(found), form) if found else ""

    path, lines = "docs/explanation/goodput.csv", []
    for kind, runs in runs_of(path, "processes", "memory", "every").items():
        faults = sum(int(row["faults"]) for row in runs)
        lines.append((*kind, f"{len(runs)}", f"{faults}", mean("goodput", ".0%"),
                      mean("lost_s", ".1f"), mean("to_next_step_s", ".1f")))  # fmt: skip
    heads = ("processes", "copies in memory", "restart times between faults", "runs", "faults",
             "goodput", "seconds lost", "seconds to the next step")  # fmt: skip
    rows = rows_of(path)
    whole = {row["processes"]: row["bits"] for row in rows if row["every"] == "none"}
    same = sum(row["bits"] == whole[row["processes"]] for row in rows)
    verdict = f"{same} of {len(rows)} runs ended with the bits of the run without faults."
    return f"{table(heads, lines)}\n\n{verdict}\n"


def mean_of(rows: list[dict], column: str, form: str = ".2f") -> str:
    """The mean of a column; with its deviation, if several rows have a value; "" if none has."""
    found = [float(row[column]) for row in rows if row[column]]
    if not found:
        return ""
    deviation = f" ± {statistics.stdev(found):{form}}" if len(found) > 1 else ""
    return f"{statistics.mean(found):{form}}{deviation}"


def cifar10_fast() -> str:
    """A row for each kind of run of docs/explanation/cifar10_fast.csv."""
    lines = []
    for (form, run), runs in runs_of("docs/explanation/cifar10_fast.csv", "form", "run").items():
        lines.append((f"`{form}`", run, seeds_of(runs), runs[0]["steps"],
                      mean_of(runs, "cpu_s", ".0f"), mean_of(runs, "pflop", ".4f"),
                      mean_of(runs, "top1"), mean_of(runs, "top1_flips")))  # fmt: skip
    heads = ("form", "run", "seeds", "steps", "CPU seconds", "PFLOP", "top-1, %", "with flips, %")
    return table(heads, lines)


def selfsup_cifar10() -> str:
    """A row for each method of docs/explanation/selfsup_cifar10.csv, by its least gain."""
    found = runs_of("docs/explanation/selfsup_cifar10.csv", "judge", "run")
    found = {name: runs for (judge, name), runs in found.items() if judge == "test"}
    lines = []
    for name, runs in found.items():
        gains = [float(r["last"]) - max(float(r["random"]), float(r["pixels"])) for r in runs]
        columns = ("random", "pixels", "last", "best", "probe")
        lines.append((min(gains), (
            name, seeds_of(runs), runs[0]["steps"], mean_of(runs, "cpu_s", ".0f"),
            mean_of(runs, "pflop", ".3f"), *(mean_of(runs, column) for column in columns),
            f"{min(gains):+.2f}",
        )))  # fmt: skip
    heads = ("run", "seeds", "steps", "CPU seconds", "PFLOP", "random weights, %", "pixels, %",
             "20-NN at the end, %", "best of ten, %", "linear probe, %", "least gain")  # fmt: skip
    return table(heads, [line for _, line in sorted(lines, reverse=True)])


def words_cifar10() -> str:
    """A row for each kind of run of docs/explanation/words_cifar10.csv."""
    lines = []
    for (run, steps), runs in runs_of("docs/explanation/words_cifar10.csv", "run", "steps").items():
        cells = [mean_of(runs, "cpu_s", ".0f")]
        cells += [mean_of(runs, column) for column in ("test", "pairs", "probe")]
        cells += [
            " / ".join(filter(None, (mean_of(runs, f"{way}_recall{k}", ".0f") for k in (1, 5, 10))))
            for way in ("image_to_text", "text_to_image")
        ]
        lines.append((run, seeds_of(runs), steps, *cells))
    heads = ("run", "seeds", "steps", "CPU seconds", "zero-shot top-1, %", "left-out pairs, %",
             "linear probe, %", "image to text, recall at 1/5/10, %", "text to image")  # fmt: skip
    return table(heads, lines)


def planted_duplicates(by: str = "bits") -> str:
    """A row for each kind of copy of docs/how_to/planted_duplicates.csv, a column for each rule."""
    read = [row for row in rows_of("docs/how_to/planted_duplicates.csv") if by in row["by"]]
    found = {(r["kind"], f"{r['pictures']}, {r['by']}"): r for r in read}
    kinds, rules = ([*dict.fromkeys(key[i] for key in found)] for i in (0, 1))
    kinds, rules = ([x for x in xs if "pairs" not in x and "60,500" not in x]
                    for xs in (kinds, rules))  # fmt: skip
    rows = [(kind, *(f"{float(found[kind, rule]['recall']):.1%}" for rule in rules))
            for kind in (*kinds, "right pairs")]  # fmt: skip
    return table(("copy", *rules), rows)


def planted_by_features() -> str:
    """As `planted_duplicates`, by the cosine of a model's features."""
    return planted_duplicates("cosine")


def prepare_costs() -> str:
    """A row for each size of docs/how_to/prepare_costs.csv, a column for each program."""
    rows = rows_of("docs/how_to/prepare_costs.csv")
    sizes = (f"`--side={row['side']}`" if row["side"] else "kept as they are" for row in rows)
    found = [(size, *[*row.values()][1:]) for size, row in zip(sizes, rows, strict=True)]
    return table(("photographs", *[*rows[0]][1:]), found)


def many_records() -> str:
    """A row for each stage of docs/explanation/many_records.csv."""
    found = [(row["stage"], f"{int(row['records']):,}", row["cpu_s"], row["peak_gib"])
             for row in rows_of("docs/explanation/many_records.csv")]  # fmt: skip
    return table(("stage", "records", "CPU s", "peak, GiB"), found)


def picture_costs() -> str:
    """A row for each step of docs/explanation/picture_costs.csv."""
    found = [(row["step"], *(f"{float(row[key]):.3g}" for key in ("cpu_ms", "least", "most")))
             for row in rows_of("docs/explanation/picture_costs.csv")]  # fmt: skip
    return table(("step", "CPU ms a picture", "least", "most"), found)


def shuffling() -> str:
    """A row for each order of docs/explanation/shuffling.csv."""
    found = []
    for row in rows_of("docs/explanation/shuffling.csv"):
        how = (row[key].replace("None", "") for key in ("chunk_size", "streams"))
        classes, again = f"{float(row['classes']):.0f}", f"{float(row['again']):.2%}"
        found.append((f"`{row['order']}`", *how, classes, again))
    return table(("order", "chunk", "streams", "classes in a batch", "pairs again"), found)


def shuffling_runs() -> str:
    """A row for each kind of run of docs/explanation/shuffling_runs.csv."""
    kinds = runs_of("docs/explanation/shuffling_runs.csv", "run").items()
    found = [(*kind, seeds_of(runs), mean_of(runs, "top1")) for kind, runs in kinds]
    return table(("order", "seeds", "top-1, %"), found)


def native_or_square() -> str:
    """A row for each task and form of docs/explanation/native_or_square.csv."""
    kinds = runs_of("docs/explanation/native_or_square.csv", "task", "form").items()
    found = [(*kind, seeds_of(runs), mean_of(runs, "top1")) for kind, runs in kinds]
    return table(("class", "form", "seeds", "top-1, %"), found)


def curated_cifar10() -> str:
    """A row for each kind of run of docs/explanation/curated_cifar10.csv."""
    kinds, found = runs_of("docs/explanation/curated_cifar10.csv", "arm"), []
    for arm, said in (("random", "drawn at random"), ("supervised", "`curate`")):
        runs = kinds[(arm,)]
        counts = [mean_of(runs, column, ".0f") for column in ("largest", "smallest")]
        scores = [mean_of(runs, column) for column in ("classes", "20nn", "probe")]
        found.append((said, seeds_of(runs), *counts, *scores))
    heads = ("2,500 images", "seeds", "largest class", "smallest class", "classes of equal size "
             "with the same entropy", "20-NN, %", "linear probe, %")  # fmt: skip
    return table(heads, found)


def exports() -> str:
    """A row for each model of docs/how_to/exports.csv, with a cell for each format."""
    read = rows_of("docs/how_to/exports.csv")
    found = {(r["model"], f"{r['format']} {r['precision']}"): r for r in read}
    heads, kinds = (dict.fromkeys(key[i] for key in found) for i in (1, 0))

    def found_by(row: dict | None) -> str:
        if row is None:
            return "not measured"
        return row["refused"] or f"{row['cosine']}; {row['error']}; {row['ms']} / {row['ours_ms']}"

    lines = [(kind, *(found_by(found.get((kind, head))) for head in heads)) for kind in kinds]
    return table(("model", *heads), lines)


ALL = (
    cifar10_fast, curated_cifar10, exports, goodput, many_records, native_or_square,
    picture_costs, planted_by_features, planted_duplicates, prepare_costs, selfsup_cifar10,
    shuffling, shuffling_runs, words_cifar10,
)  # fmt: skip
