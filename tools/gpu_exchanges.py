"""How long a step on GPUs waits for its exchanges, by XLA's schedule and options of its compiler.

python tools/gpu_exchanges.py RECIPE [KEY=VALUE...] [-- OPTION=VALUE...]

It prints one row for XLA's defaults and, if OPTIONs are given, one row for these, by
`planning.compiled.scheduled_s`. The tool needs JAX's plugin for CUDA, and no GPU.
"""

import json
import sys
from collections import Counter

import jax

from vit_jax.config import Settings
from vit_jax.config.text import load_config
from vit_jax.devices.chips import find_slice
from vit_jax.planning.compiled import scheduled_s
from vit_jax.planning.hlo import Program
from vit_jax.planning.targets import Target, plan_mesh, start_planning
from vit_jax.run.setup.opener import Tables
from vit_jax.run.setup.resolve import resolve
from vit_jax.run.teachers import planned_experiment

H100 = Target(find_slice("H100:8"))


def main(recipe: str, *words: str) -> None:
    """Print the table."""
    at = words.index("--") if "--" in words else len(words)
    keys, options = (
        {key: json.loads(value) for key, value in (word.split("=") for word in some)}
        for some in (words[:at], words[at + 1 :])
    )
    start_planning(H100)
    config = load_config(recipe)
    config.update_from_flattened_dict(keys)
    settings = resolve(Settings.of(config), Tables()).settings
    mesh = plan_mesh(settings, H100)
    with jax.set_mesh(mesh):
        lowered = planned_experiment(settings, mesh).lower()
    print("| options | ms: kernels | exchanges | step | GB of temporaries | exchanges |")
    print("|---|---|---|---|---|---|")
    for chosen in ({}, options) if options else ({},):
        compiled = lowered.compile(compiler_options=chosen)
        program = Program(compiled.as_text())
        found = program.collectives()
        counts = dict(Counter(f"{each.kind}, {each.size / 2**20:.1f} MiB" for each in found))
        times = scheduled_s(program, mesh, H100)
        ms = " | ".join(f"{1e3 * seconds:.2f}" for seconds in times.values())
        gb = compiled.memory_analysis().temp_size_in_bytes / 1e9
        print(f"| {chosen} | {ms} | {gb:.2f} | {counts} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
