"""Run the commands and the Python of a tutorial in this folder, and print each block's output.

python tutorial_run.py TUTORIAL.md runs the lines that begin with vit_jax in blocks of ```sh, and of
```bash, which marks a faulty command. It prints JSON: a list of [block, its output, the output that
the tutorial shows below it].
"""

import contextlib
import io
import json
import pathlib
import re
import shlex
import sys

from vit_jax.main import main
from vit_jax.run import terminal


def read_blocks(page):
    """(kind, content) of every fenced block."""
    return re.findall(r"^```(sh|bash|python|text)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def run(kind, content, names):
    """Run a block; return what it prints."""
    printed = io.StringIO()
    terminal.CONSOLE.width = 200
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        if kind == "python":
            exec(compile(content, "tutorial", "exec"), names)
        else:
            lines = content.replace("\\\n", " ").splitlines()
            for line in lines:
                words = shlex.split(line, comments=True)
                if words[:1] == ["vit_jax"]:
                    main(words[1:])
    return printed.getvalue()


def run_all(path):
    done, names = [], {}
    for kind, content in read_blocks(pathlib.Path(path).read_text()):
        if kind == "text":
            done[-1][2] = content
        else:
            done.append([content, run(kind, content, names), ""])
    return done


if __name__ == "__main__":
    found = run_all(sys.argv[1])
    print(json.dumps(found))
