"""README and docs/: links exist, commands are accepted, the parts made from the code are there."""

import ast
import asyncio
import importlib
import io
import itertools
import json
import pathlib
import re
import shlex
import string
import sys
import types
from unittest import mock

import notebooks
import numpy as np
import pytest
import yaml
from loaded_file import load_module
from PIL import Image

from vit_jax.base.errors import InputError
from vit_jax.commands import COMMANDS
from vit_jax.config import base_config, flatten
from vit_jax.config.text import apply_overrides, find_config, load_config, shipped_configs
from vit_jax.main import parse_flags

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def hooks():
    return load_module(ROOT / "docs/hooks.py")


def anchors(page):
    """As GitHub makes them from the headings of the page as it is stored."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads]
    return {f"{a}-{plain[:i].count(a)}" if a in plain[:i] else a for i, a in enumerate(plain)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        other = page if path == "" else page.parent / path
        assert other.exists(), target
        if anchor:
            assert anchor in anchors(other), target


def cut_paragraphs(text):
    """The last lines of paragraphs that neither end a sentence nor lead to a list or to code."""
    text = re.sub(r"^(```|~~~).*?^\1[ \t]*$", "    code", text, flags=re.DOTALL | re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).strip("\n"))
    return [
        last
        for this, after in itertools.zip_longest(paragraphs, paragraphs[1:], fillvalue="")
        if (last := this.rstrip().rpartition("\n")[2])
        and not re.match(r"[#|<]|    |!\[", last)
        and not re.search(r"[.:!?|)`]$", last)
        and not after.startswith("    ")
    ]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_sentence_is_cut(page):
    if "reference" not in page.parts:  # made from the code
        assert cut_paragraphs(page.read_text()) == []


def test_a_cut_sentence_is_found():
    assert cut_paragraphs("One.\n\nIt ends with\n\n```\ncode\n```\n\n| a | b |\n") == []
    assert cut_paragraphs("Done.\n\nThis sentence is\n\nAnother.") == ["This sentence is"]


def test_the_tour_of_the_code_names_every_room():
    folders = {path.parent.name for path in (ROOT / "vit_jax").glob("*/__init__.py")}
    rooms = (ROOT / "docs/explanation/code.md").read_text().partition("## The rooms")[2]
    table = rooms.partition("|")[2].partition("## The rules")[0]
    named = re.findall(r"`(\w+)/`", table)
    assert sorted(named) == sorted(folders)


def imported_rooms(node, known):
    """Of the rooms `known`, those that a module imports when it runs, also within functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom):
            names = [f"{child.module}.{alias.name}" for alias in child.names]
        else:
            names = [a.name for a in child.names] if isinstance(child, ast.Import) else []
        parts = [name.split(".") for name in names]
        yield from (p[1] for p in parts if p[0] == "vit_jax" and p[1:] and p[1] in known)
        yield from imported_rooms(child, known)


def test_rooms_import_those_below_and_to_their_right():
    """As the table of the tour of the code has them."""
    page = (ROOT / "docs/explanation/code.md").read_text()
    table = page.partition("| floor | rooms |")[2].partition("## The rules")[0]
    rooms = re.findall(r"`(\w+)[/.]", table)  # in the order of the page; api is a file
    assert {"commands", "api", "base"} <= {*rooms} and len(rooms) == len({*rooms})
    found = set()
    for path in (ROOT / "vit_jax").rglob("*.py"):
        room = path.relative_to(ROOT / "vit_jax").parts[0].removesuffix(".py")
        if room in rooms:
            imports = {*imported_rooms(ast.parse(path.read_text()), rooms)} - {room}
            found |= {(room, other) for other in imports}
    assert len(found) > 50
    wrong = {(a, b) for a, b in found if rooms.index(a) > rooms.index(b)}
    assert wrong == set()


def documented_commands():
    """(page, words) of each command, with the variables of its page."""
    for page in [*PAGES, *notebooks.FREE]:
        known = {"W": "W"}
        blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
        for block in blocks if page in PAGES else notebooks.commands(page):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"(^|\s)#.*", "", line).replace("$(", "$$(")
                words = shlex.split(string.Template(line).safe_substitute(known))
                if words and all(re.match(r"[A-Z_]+=", word) for word in words):
                    for word in words:
                        name, _, value = word.partition("=")
                        known[name] = string.Template(value).safe_substitute(known)
                for _, part in itertools.groupby(words, key=lambda word: word == "&&"):
                    yield page.relative_to(ROOT), list(part)


def words_of_program(words):
    """The words behind vit_jax or a launcher's `--`, without what only stands for a choice."""
    for program in (["vit_jax"], ["python", "-m", "vit_jax.main"]):
        for at in range(len(words)):
            if words[at : at + len(program)] == program:
                return words[at + len(program) :]
    if "--" in words and any(word.startswith("launch/") for word in words):
        return words[words.index("--") + 1 :]
    return None


PROGRAMS = [
    pytest.param(found, id=f"{page}: {' '.join(found)[:60]}")
    for page, words in documented_commands()
    if (found := words_of_program(words)) is not None
]


def test_commands_are_found():
    assert len(PROGRAMS) > 50


def refusal(words):
    """What the program would refuse in `words` before it reads data or devices; else None."""
    command, rest = (
        ("train", words) if words[:1] == [] or words[0][0] == "-" else (words[0], words[1:])
    )
    if command not in COMMANDS:
        return f"{command}: no such command"
    if any(word.endswith("help") for word in rest):
        return None
    try:
        flags = parse_flags(command, rest)
        config = getattr(flags, "config", None)
        if config is None or flags.plugins or config.partition(":")[0] not in documented_names():
            return None
        faults = apply_overrides(load_config(config), flags.overrides)
    except InputError as e:
        return str(e)
    return "; ".join(faults) or None


def documented_names():
    names = shipped_configs()
    return {*names, *(f"configs/{name}.py" for name in names)}


@pytest.mark.parametrize("words", PROGRAMS)
def test_documented_command_is_accepted(words):
    """Or a page shows the error as its output."""
    said = refusal(words)
    assert said is None or any(
        re.search(rf"^error: .*{re.escape(said)}", page.read_text(), re.MULTILINE) for page in PAGES
    ), said


def test_a_wrong_documented_command_is_refused():
    assert "--confg" in refusal(["--confg=quickstart"])
    assert "optimizer.peak_rl" in refusal(["--config=quickstart", "--config.optimizer.peak_rl=1"])
    assert "trian" in refusal(["trian"])
    assert find_config("quickstart").exists()


def test_launchers_take_the_documented_flags(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    seen = set()
    for page, words in documented_commands():
        at = next((i for i, word in enumerate(words) if re.match(r"launch/\w+\.py$", word)), None)
        if at is None:
            continue
        name = pathlib.Path(words[at]).stem
        end = words.index("--") if "--" in words else len(words)
        parser = importlib.import_module(name).define_flags()
        flags = [word for word in words[at + 1 : end] if word not in ("create", "run", "status")]
        known = {option for action in parser._actions for option in action.option_strings}
        for flag in flags:
            if flag.startswith("-"):
                assert flag.partition("=")[0] in known, (page, flag)
        seen.add(name)
    assert seen == {"local", "slurm", "kubernetes", "tpu_vm", "skypilot"}


def test_reference_of_config_keys_has_every_key(hooks):
    text = hooks.config_keys()
    for key in flatten(base_config()):
        assert f"| `{key}` |" in text
    assert "`--config" not in text


def test_pages_are_filled_in_from_the_code(hooks):
    marks = re.findall(r"<!-- made by (\w+) -->", "".join(page.read_text() for page in PAGES))
    assert sorted(marks) == sorted(hooks.PARTS)
    text = hooks.on_page_markdown("before\n<!-- made by configs -->\nafter")
    assert text.startswith("before\n## adam_or_sgd\n") and text.endswith("after")
    for name in shipped_configs():
        assert f"\n## {name}\n" in text
        assert f"| [{name}](#{name}) | " in hooks.config_words()


def test_reference_of_commands(hooks):
    sections = hooks.commands().split("\n## ")[1:]
    assert [text.partition("\n")[0] for text in sections] == list(COMMANDS)
    for flag in ("`--launcher=COMMAND`", "`--plan=SLICE`", "`--again`"):
        assert any(f"\n| {flag} | " in text for text in sections)


def test_reference_of_launchers(hooks, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    text = hooks.launchers()
    for name in hooks.LAUNCHERS:
        assert f"## launch/{name}.py\n" in text and f"python launch/{name}.py " in text


def test_tables_that_are_checked_in_are_those_of_the_code(hooks):
    tables = [page for page in PAGES if "<!-- end of " in page.read_text()]
    assert [page.name for page in tables] == [
        "does_it_learn.md", "large_sets.md", "recipe_costs.md", "curate.md", "deploy.md",
        "duplicates.md", "prepare.md", "training.md", "trust.md", "commands.md", "config.md",
        "configs.md", "evaluators.md", "launchers.md", "measured.md", "ops.md",
        "other_libraries.md", "notebook.md",
    ]  # fmt: skip
    for page in tables:
        text = page.read_text()
        assert hooks.with_tables(text) == text, f"{page}: run python docs/hooks.py"
    assert "| `shots` | tuple | `(1, 5, 10, 25)` |" in hooks.evaluator_keys()


@pytest.mark.parametrize(("runtime", "channels"), [("onnx", 1), ("onnx", 3), ("jax", 4)])
def test_the_server_of_the_page_answers_after_a_failure(runtime, channels, tmp_path, monkeypatch):
    """FastAPI and the model are replaced, `read`, `run` and `compute` are the page's."""
    page = (ROOT / "docs/how_to/deploy.md").read_text()
    server, of_jax, _, cover = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    pixels = {"image_size": [4, 6], "mean": [0.5] * channels}
    receipt = json.dumps({"preprocessing": pixels, "class_names": None})
    model = mock.Mock(side_effect=lambda images: images.reshape(len(images), -1)[:, :5])
    for name in ("mine.onnx", "mine.stablehlo"):
        (tmp_path / f"{name}.receipt.json").write_text(receipt)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for name in ("fastapi", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    sys.modules["onnxruntime"].InferenceSession().run = lambda _, given: [model(given["images"])]
    names = types.SimpleNamespace(
        jit=lambda call: call, export=mock.Mock(**{"deserialize.return_value.call": model})
    )
    if runtime == "jax":
        server = re.sub(r"session = .*\n", "", server.replace("mine.onnx", "mine.stablehlo"))
        server = re.sub(r"(?s)def run.*?\n\n\n", f"{of_jax}\n\n", server)
    exec(server, serve := {"jax": names})

    async def ask(image):
        answer = asyncio.get_running_loop().create_future()
        await serve["waiting"].put((image, answer))
        return await asyncio.wait_for(answer, 20)

    async def serve_three():
        task = asyncio.create_task(serve["compute"]())
        image = serve["read"](file.getvalue())
        assert image.shape == (4, 6, channels) and image.dtype == np.uint8
        assert (await ask(image)).tolist() == image.ravel()[:5].tolist()
        works, model.side_effect = model.side_effect, MemoryError("too large")
        with pytest.raises(MemoryError, match="too large"):
            await ask(image)
        model.side_effect = works
        assert (await ask(image)).tolist() == image.ravel()[:5].tolist()
        task.cancel()

    Image.new("RGBA", (9, 5), (200, 100, 50, 120)).save(file := io.BytesIO(), "PNG")
    asyncio.run(serve_three())
    exec(cover, serve)
    assert serve["read"](file.getvalue()).shape == (4, 6, channels)


def test_the_notebook_for_kaggle_is_made_from_that_for_colab(hooks):
    colab, kaggle = (path.read_text() for path in notebooks.FREE)
    assert hooks.for_kaggle(colab) == kaggle, "run python docs/hooks.py"
    found = "\n".join("".join(cell["source"]) for cell in json.loads(colab)["cells"])
    assert all(found.count(text) == 1 for text in hooks._ON_KAGGLE)


def test_reference_of_ops_has_every_op():
    from vit_jax.config import OPS

    page = (ROOT / "docs/reference/ops.md").read_text()
    for name in OPS:
        op = OPS.find(name)
        assert f"\n### {name}\n\n`{name}{op.signature()}`: " in page
        assert all(f"- `{k}` (" in page for k in op.declared())
    assert "- `crop` (float, [0.01, 1]): Share" in page


def test_the_site_can_be_searched_from_disk():
    """Browsers start no worker there; without this file the plugin would fetch it from a host."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert "offline" in site["plugins"]
    (script,) = site["extra"]["polyfills"]
    assert "iframe-worker" in script and "window.Worker=" in (ROOT / "docs" / script).read_text()


def test_docstrings_become_lists_and_labels():
    pytest.importorskip("griffe", reason="of the extra docs")
    readable = load_module(ROOT / "docs/docstrings.py").readable
    text = readable(
        "Head.\n\nrows: the first\n  of two.\nstd: more.\n\nRaises: E if\n  it fails.\n"
    )
    assert "- **rows:** the first of two.\n- **std:** more." in text
    assert "**Raises:** E if it fails." in text
    assert readable("Head: no label.\n\nRaises:\n  E: if so.").endswith("Raises:\n  E: if so.")
