"""Fills in the parts of the docs that come from the code, while MkDocs builds the site.

A line `<!-- made by NAME -->` in a page is replaced by the text that the function NAME of PARTS
returns. If a line `<!-- end of NAME -->` follows, `python docs/hooks.py` writes the text between
the two, to be checked in; a test holds it equal to the code. It also writes the notebook for Kaggle
from the one for Colab.
"""

import argparse
import importlib
import inspect
import json
import re
import sys

import measured_tables
from measured_tables import ROOT, table

LAUNCHERS = ("local", "slurm", "kubernetes", "tpu_vm", "skypilot")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _text(declared) -> str:
    """The docstring of `declared`, a line for each paragraph; a renderer breaks the lines."""
    paragraphs = (inspect.getdoc(declared) or "").split("\n\n")
    return "\n\n".join(text if "\n " in text else " ".join(text.split("\n")) for text in paragraphs)


def _row(name: str, declared) -> tuple[str, ...]:
    kind = declared.describe() if declared.kind is object else declared.kind.__name__
    default = "required" if declared.default is ... else f"`{declared.default!r}`"
    limits = declared.within or ", ".join(declared.choices)
    return (f"`{name}`", kind, default, limits, _sentence(declared.meaning))


def _keys_of(declared: dict, prefix: str = "") -> str:
    """The table of the keys {name: declaration}."""
    heads = ("key", "type", "default", "range or choices", "meaning")
    return table(heads, [_row(prefix + name, key) for name, key in declared.items()])


def config_keys() -> str:
    """A table for each section of the config and each of its parts: what they declare."""
    from vit_jax.config.registries import REGISTRIES
    from vit_jax.config.sections import SECTIONS

    pieces = []
    registries = {registry.section: registry for registry in REGISTRIES}
    for name, section in SECTIONS.items():
        prefix = f"{name}." if name else ""
        own = _keys_of(section.declared(), prefix)
        pieces += [f"## {name or 'The run'}", "", _text(section), "", own, ""]
        for choice in registries.get(name, ()):
            pieces += [f"### {choice}", "", *_part(registries[name], choice, prefix)]
    return "\n".join(pieces)


def _part(registry, name: str, prefix: str) -> list[str]:
    """What the part called `name` says of itself, and its keys that no part it extends has."""
    part = registry.find(name)
    bases = [n for n in registry if n != name and issubclass(part, registry.find(n))]
    taken = [item for base in bases for item in registry.keys_of(registry.find(base)).items()]
    keys = {k: key for k, key in registry.keys_of(part).items() if (k, key) not in taken}
    says = _text(part)
    if registry.section == "model":  # the rest is for those who call it in Python
        says = says.partition("\n\n")[0]
    also = f" It has the keys of {' and '.join(bases)}" if bases else ""
    ending = (" too, and these:" if keys else " too.") if bases else ""
    return [says + also + ending, "", *([_keys_of(keys, prefix), ""] if keys else [])]


def evaluator_keys() -> str:
    """A table of the keys that all entries of `evals` have, and of each evaluator's own keys."""
    from vit_jax.config import EVALUATORS, Evaluator

    common = Evaluator.declared()
    parts = ["### All evaluators", "", _keys_of(common), ""]
    for kind in EVALUATORS:
        evaluator = EVALUATORS.find(kind)
        own = {k: declared for k, declared in evaluator.declared().items() if k not in common}
        parts += [f"### {kind}", "", _text(evaluator), "", _keys_of(own), ""]
    return "\n".join(parts)


def metrics() -> str:
    """A table of the metrics of labelled images."""
    from vit_jax.config import METRICS

    found = {name: METRICS.find(name) for name in METRICS}
    rows = [(f"`{name}`", metric.better, _text(metric)) for name, metric in found.items()]
    return table(("metric", "better", ""), rows)


def _console(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


def _flags(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """(flag, meaning) of each flag of `parser`; those that all commands have are left out."""
    rows = []
    for action in parser._actions:
        names = action.option_strings or [action.dest]
        if names[-1] in ("--help", "--trust_plugins", "--quiet"):
            continue
        value = action.metavar or (action.choices and "{" + ",".join(action.choices) + "}")
        takes_value = bool(action.option_strings) and action.nargs != 0
        shown = f"{names[-1]}={value or 'VALUE'}" if takes_value else names[-1]
        rows.append((f"`{shown}`", (action.help or "").replace("%%", "%")))
    return rows


def commands() -> str:
    """What the program does, and the help of each of its commands."""
    from vit_jax import main
    from vit_jax.commands import COMMANDS, find_command

    parts = [_console(inspect.cleandoc(main.__doc__))]
    shown: list[tuple[str, str]] = []
    for name in COMMANDS:
        module = find_command(name)
        parser = argparse.ArgumentParser()
        module.define_flags(parser)
        flags = _flags(parser)
        shared = [flag for flag, meaning in flags if (flag, meaning) in shown and meaning]
        own = [row for row in flags if row[0] not in shared]
        parts += [f"## {name}", "", _console(inspect.cleandoc(module.__doc__))]
        parts += [table(("flag", ""), own), ""] if own else []
        again = ", ".join(flag.partition("=")[0].strip("`").join("``") for flag in shared)
        parts += [f"As above: {again}.", ""] if shared else []
        shown += own
    return "\n".join(parts)


def launchers() -> str:
    """The help of each launcher."""
    sys.path.insert(0, str(ROOT / "launch"))
    parts = []
    for name in LAUNCHERS:
        parser = importlib.import_module(name).define_flags()
        text = inspect.cleandoc(parser.description)
        parts += [
            f"## launch/{name}.py",
            "",
            _console(text),
            table(("flag", ""), _flags(parser)),
            "",
        ]
    return "\n".join(parts)


def config_words() -> str:
    """A table of the configs that come with the package: what each trains, and its words."""
    from vit_jax.config.text import import_config, shipped_configs

    rows = []
    for name, path in shipped_configs().items():
        config = import_config(path)
        head = config.__doc__.partition("\n")[0]
        words = "; ".join(f"`{word}`: {meaning}" for word, meaning in config.WORDS.items())
        rows.append((f"[{name}](#{name})", re.sub(r": --config=(\S+)$", r": `\1`", head), words))
    return table(("config", "", "words"), rows)


def configs() -> str:
    """The docstring of each config that comes with the package."""
    from vit_jax.config.text import import_config, shipped_configs

    parts = []
    for name, path in shipped_configs().items():
        text = inspect.cleandoc(import_config(path).__doc__)
        parts += [f"## {name}", "", _console(text)]
    return "\n".join(parts)


def host_ops() -> str:
    """What each op of the host declares."""
    from vit_jax.data.ops import HostOp

    return _ops(HostOp)


def device_ops() -> str:
    """What each op of the device declares."""
    from vit_jax.data.ops import DeviceOp

    return _ops(DeviceOp)


def _ops(kind: type) -> str:
    from vit_jax.config.registries import OPS

    pieces = []
    for name in OPS:
        op = OPS.find(name)
        if issubclass(op, kind):
            pieces += [f"### {name}", "", f"`{name}{op.signature()}`: {_text(op)}", ""]
            rows = [_row(k, declared) for k, declared in op.declared().items()]
            for argument, of_kind, _, limits, meaning in rows:
                stated = f"{of_kind}, {limits}" if limits else of_kind
                pieces.append(f"- {argument} ({stated}): {meaning}")
            pieces += [""] if rows else []
    return "\n".join(pieces)


def faults() -> str:
    """The table of the faults that `job.inject` makes."""
    from vit_jax.run.watch.faults import FAULTS

    rows = [(f"`{example}`", _sentence(meaning)) for example, meaning in FAULTS.items()]
    return table(("fault", "before step 12"), rows)


def notebook() -> str:
    """The cells of the tutorial's notebook; headings of the page's title are left out."""
    cells = json.loads((ROOT / "docs/tutorials/notebook.ipynb").read_text())["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            parts += [f"```python\n{source}\n```", ""]
        else:
            parts += [re.sub(r"^# .*\n+", "", source), ""]
    return "\n".join(parts)


def flags_of_others() -> str:
    """A table of the flags of other libraries and the keys that do the same."""
    from vit_jax.config.other_words import FLAGS, LIBRARIES, WITHOUT_KEY

    def cell(names: str) -> str:
        return " ".join(f"`{name}`" for name in names.split())

    rows = [(cell(f.key), *(cell(getattr(f, name)) for name in LIBRARIES), f.note) for f in FLAGS]
    named = table(("key", *LIBRARIES.values(), "differs"), rows)
    without = table(("no key", "do"), [(cell(names), do) for do, names in WITHOUT_KEY.items()])
    return f"{named}\n\n{without}"


def recipe_costs() -> str:
    """A table for each slice, by calculation and by its compiler."""
    from vit_jax.planning.recipe_costs import read_costs

    verdicts = {"yes": "", "maybe": " (may not fit)", "no": " (too much)"}
    groups: dict[str, list[dict[str, str]]] = {}
    for row in read_costs():
        by_compiler = ", by its compiler" * (row["by"] == "compiler")
        groups.setdefault(row["slice"] + by_compiler, []).append(row)
    parts = []
    for title, rows in groups.items():
        columns = {
            "recipe": lambda row: f"`{row['recipe']}`",
            "batch": lambda row: f"{int(row['batch']):,}",
            "layout": lambda row: row["layout"],
            "Mcycles": lambda row: row["mcycles"],
            "ms by kernels": lambda row: row["kernels_ms"],
            "ms a step": lambda row: f"{float(row['step_ms']):,}",
            "MFU": lambda row: f"{float(row['mfu']):.0%}",
            "peak, GiB": lambda row: row["peak_gib"] + verdicts[row["fits"]],
            "MiB sent: waits + hidden": lambda row: (
                f"{int(row['waits_mib']):,} + {int(row['hidden_mib']):,}"
            ),
            "images/s": lambda row: f"{int(row['images_per_s']):,}",
            "CPU ms there is": lambda row: row["cpu_ms"],
            "chip-hours": lambda row: f"{float(row['chip_hours']):,.10g}",
        }
        shown = {head: [cell(row) for row in rows] for head, cell in columns.items()}
        shown = {head: cells for head, cells in shown.items() if any(cells)}
        parts += [f"## {title}", "", table((*shown,), [*zip(*shown.values(), strict=True)]), ""]
    return "\n".join(parts)


def certificates() -> str:
    """A row for each step of the certificates in docs/certificates/."""
    rows = []
    for path in sorted((ROOT / "docs/certificates").glob("*.json")):
        made = json.loads(path.read_text())
        devices = made["parts"]["devices"]
        for step in made["parts"]["steps"]["rows"]:
            if "step_s" in step:
                planned = step.get("planned_memory_bytes")
                rows.append((
                    f"{devices['num_devices']} x {devices['device_kind']}",
                    made["made"], f"jax {devices['software']['jax']}", step["model"],
                    f"{step['global_batch_size']}, {step['dtype']}", f"{1e3 * step['step_s']:,.4g}",
                    "" if step["mfu"] is None else f"{step['mfu']:.0%}",
                    f"{step['memory_bytes'] / 2**30:.2f}",
                    "" if planned is None else f"{planned / step['memory_bytes']:.2f}",
                ))  # fmt: skip
    heads = ("devices", "day", "software", "model", "batch", "ms a step", "MFU", "memory, GiB",
             "planned")  # fmt: skip
    return table(heads, rows)


_MADE = (
    certificates, commands, config_keys, config_words, configs, device_ops, evaluator_keys, faults,
    flags_of_others, host_ops, launchers, metrics, notebook, recipe_costs, *measured_tables.ALL,
)  # fmt: skip
PARTS = {part.__name__: part for part in _MADE}


def on_page_markdown(markdown: str, page=None, **_) -> str:
    """MkDocs calls this with the text of each page; tables that are checked in stay as they are."""
    if page is not None and page.file.src_uri.startswith("reference/api/"):
        page.meta["search"] = {"boost": 1e-3}  # titles count a thousandfold; guides come first
    alone = r"<!-- made by (\w+) -->(?!.*<!-- end of \1 -->)"
    return re.sub(alone, lambda match: PARTS[match[1]](), markdown, flags=re.DOTALL)


def with_tables(markdown: str) -> str:
    """`markdown` with new text in each place `<!-- made by NAME -->...<!-- end of NAME -->`."""
    place = r"(<!-- made by (\w+) -->\n).*(<!-- end of \2 -->)"
    return re.sub(
        place,
        lambda match: f"{match[1]}\n{PARTS[match[2]]()}\n{match[3]}",
        markdown,
        flags=re.DOTALL,
    )


# {text of docs/notebooks/colab.ipynb: text of kaggle.ipynb}
_ON_KAGGLE = {
    "a free accelerator of Google Colab": "a free accelerator of Kaggle",
    "Runtime > Change runtime type: choose T4 GPU or v5e-1 TPU. In the next cell, replace OWNER by "
    "the account that has the\nrepository. Then choose Runtime > Run all.":
    "In the settings at the right, choose the accelerator TPU v5e-8 or GPU T4 x2, and turn the "
    "internet on. In the next cell,\nreplace OWNER by the account that has the repository. Then "
    "choose Run > Run all.",
    '"2 epochs" if ON_GPU else "20 epochs"': '"4 epochs" if ON_GPU else "60 epochs"',
    "# Colab has": "# Kaggle has",
    "The machine and its files are deleted when you leave. Download the folders `certificate` and "
    "`exported` before: in the\nfile browser at the left.":
    "Save Version > Save & Run All keeps the folders `certificate` and `exported` as the "
    "notebook's output. Files of a draft\nare deleted when its session ends.",
}  # fmt: skip


def for_kaggle(colab: str) -> str:
    """The notebook for Kaggle, from `colab`, the one for Colab."""
    made = json.loads(colab)
    del made["metadata"]["accelerator"], made["metadata"]["colab"]
    for cell in made["cells"]:
        source = "".join(cell["source"])
        for text, other in _ON_KAGGLE.items():
            source = source.replace(text, other)
        cell["source"] = source.splitlines(keepends=True)
    return json.dumps(made, indent=1) + "\n"


if __name__ == "__main__":  # rewrites what is checked in
    for page in sorted((ROOT / "docs").rglob("*.md")):
        page.write_text(with_tables(page.read_text()))
    folder = ROOT / "docs/notebooks"
    (folder / "kaggle.ipynb").write_text(for_kaggle((folder / "colab.ipynb").read_text()))
