"""Fills in the parts of the docs that come from the code, while MkDocs builds the site.

A line `<!-- made by NAME -->` in a page is replaced by the text that the function NAME of PARTS
returns. Nothing is copied by hand, so the reference cannot fall behind the code.
"""

import ast
import contextlib
import importlib
import inspect
import io
import json
import os
import pathlib
import re
import sys
import textwrap
import tokenize

ROOT = pathlib.Path(__file__).resolve().parents[1]
LAUNCHERS = ("local", "slurm", "kubernetes", "tpu_vm")


def key_comments(path: pathlib.Path) -> dict[str, str]:
    """{"model.name": comment} of the assignments `c.model.name = ...` in a Python file.

    A comment stands behind its assignment, or on the lines right above it.
    """
    source = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    by_line = {row: text for (row, _), text in comments.items()}
    alone = {row for row, column in comments if not source.splitlines()[row - 1][:column].strip()}
    found = {}
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)):
            continue
        name, _, key = ast.unparse(node.targets[0]).partition(".")
        if name != "c":
            continue
        rows, row = [], node.lineno - 1
        while row in alone:
            rows.insert(0, row)
            row -= 1
        rows += [node.end_lineno] if node.end_lineno in by_line else []
        found[key] = " ".join(by_line[row] for row in rows)
    return found


def _cell(text: str) -> str:
    """`text` in a table: a pipe outside of code would begin the next cell."""
    parts = text.split("`")
    return "`".join([part.replace("|", "&#124;") if i % 2 == 0 else part
                     for i, part in enumerate(parts)])  # fmt: skip


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(map(_cell, row)) + " |" for row in rows)])


def config_keys() -> str:
    """A table for each section of the config: key, type, default, comment."""
    from vit_jax.config import REQUIRED, base_config, flatten

    config = base_config()
    comments = key_comments(ROOT / "vit_jax/config/keys.py")
    order = {key: place for place, key in enumerate(comments)}
    keys = sorted(flatten(config).items(), key=lambda item: order.get(item[0], len(order)))
    sections: dict[str, list[tuple[str, ...]]] = {}
    for key, value in sorted(keys, key=lambda item: order.get(item[0].rpartition(".")[0], -1)):
        section, _, leaf = key.rpartition(".")
        kind = (config[section] if section else config).get_type(leaf)
        name = "int or pair" if kind is object else kind.__name__
        default = "required" if key in REQUIRED else f"`{value!r}`"
        row = (f"`{key}`", name, default, _sentence(comments.get(key, "")))
        sections.setdefault(section, []).append(row)
    parts = []
    for section, rows in sections.items():
        parts += [f"## {section or 'The run'}", ""]
        if comments.get(section):
            parts += [_sentence(comments[section]) + ".", ""]
        parts += [_table(("key", "type", "default", "meaning"), rows), ""]
    return "\n".join(parts)


def evaluator_keys() -> str:
    """A table of the keys of each kind of entry of `evals`."""
    from vit_jax.config.evals import EVALUATORS, find_evaluator

    parts = []
    for kind in EVALUATORS:
        entry = find_evaluator(kind).entry
        rows = []
        for name, parameter in inspect.signature(entry).parameters.items():
            default = parameter.default
            shown = "required" if default is parameter.empty else f"`{default!r}`"
            rows.append((f"`{name}`", shown))
        parts += [f"### {kind}", ""]
        parts += [inspect.getdoc(entry) or "", ""]
        parts += [_table(("key", "default"), rows), ""]
    return "\n".join(parts)


def _console(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


def _help_of(call) -> str:
    """What `call` prints before it ends, as on a terminal of 90 columns."""
    os.environ["COLUMNS"] = "90"
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        call()
    return out.getvalue()


def commands() -> str:
    """The help of the program and of each of its commands."""
    from vit_jax.commands import COMMANDS
    from vit_jax.main import execute

    parts = [_console(_help_of(lambda: execute(["--help"])))]
    for name in COMMANDS:
        text = _help_of(lambda name=name: execute([name, "--help"]))
        parts += [f"## {name}", "", _console(text)]
    return "\n".join(parts)


def launchers() -> str:
    """The help of each launcher."""
    sys.path.insert(0, str(ROOT / "launch"))
    parts = []
    for name in LAUNCHERS:
        parser = importlib.import_module(name).define_flags()
        text = _help_of(parser.print_help)
        text = text.replace(f"launch/{pathlib.Path(sys.argv[0]).name}", f"launch/{name}.py")
        parts += [f"## launch/{name}.py", "", _console(text)]
    return "\n".join(parts)


def configs() -> str:
    """The configs that come with the package: what each trains, its words, its whole docstring."""
    from vit_jax.config.text import import_config, shipped_configs

    parts = []
    for name, path in shipped_configs().items():
        config = import_config(path)
        head, _, rest = inspect.cleandoc(config.__doc__).partition("\n")
        parts += [f"## {name}", "", head, ""]
        words = [(f"`{word}`", meaning) for word, meaning in config.WORDS.items()]
        parts += [_table(("word", "meaning"), words), ""]
        if rest.strip():
            parts += [_console(textwrap.dedent(rest).strip()), ""]
    return "\n".join(parts)


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


PARTS = {
    part.__name__: part
    for part in (commands, config_keys, configs, evaluator_keys, launchers, notebook)
}


def on_page_markdown(markdown: str, **_) -> str:
    """MkDocs calls this with the text of each page."""
    return re.sub(r"<!-- made by (\w+) -->", lambda match: PARTS[match[1]](), markdown)
