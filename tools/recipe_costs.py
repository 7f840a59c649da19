"""Makes the tables of docs/explanation/recipe_costs.md from plans of the recipes as they stand.

python tools/recipe_costs.py [--compile=v5e:4x4,H100:8] [--slice=v5e:4x4] [WORD...] > rows.md

The compiler plans the slices of --compile; others are calculated. Only recipes that contain one of
the WORDs are planned. A plan is cached, so the second call takes seconds.
"""

import argparse
import json
import subprocess
import sys

from vit_jax.devices.chips import CHIPS

DATA = "--config.data.num_classes=18291 --config.data.num_examples=303000000"  # JFT-300M
LARGER = "--config.data.num_classes=29593 --config.data.num_examples=3000000000"  # JFT-3B
SCRATCH = "--config.init_from=scratch --config.init_fields=config"  # in place of weights
RECIPES = (
    "pretrain:ViT-B/16,imagenet2012",
    "pretrain:ViT-B/16,imagenet21k",
    "pretrain:ViT-L/16,imagenet21k",
    f"pretrain:ViT-H/14,jft=jft300m {DATA}",
    f"pretrain:R50+ViT-B/16,jft=jft300m {DATA}",
    f"pretrain:BiT-R50x1,jft=jft300m {DATA}",
    "augreg:ViT-S/16,imagenet2012,medium1",
    "augreg:ViT-B/16,imagenet21k,medium2,reg",
    "vit_s16_in1k",
    "deit:ViT-B/16",
    *(f"deit3:ViT-{size}/16{blocks}" for size in "SBL" for blocks in ("", ",vit5")),
    f"deit3:ViT-L/16,finetune {SCRATCH}",
    "efficientnet:EfficientNet-B0",
    "efficientnet:EfficientNet-B7",
    "mae:ViT-L/16",
    f"mae:ViT-L/16,finetune {SCRATCH}",
    "masked_patches:ViT-B/16,imagenet2012",
    "dino",
    "dinov2",
    "dinov3",
    f"dinov3:gram {SCRATCH}",
    "lejepa",
    f"finetune:ViT-B/16,imagenet2012 {SCRATCH}",
    "cifar10",
)
GIANTS = tuple(f"giant:ViT-{size}/14,jft=jft3b {LARGER}" for size in ("g", "G", "22B"))
# {slice: (dollars a chip and hour on demand, CPUs of a host, chips of a host)}
SLICES = {
    "v5e:4x4": (1.2, 112, 4),
    "v6e:4x4": (2.7, 180, 4),
    "v5p:4x4x4": (4.2, 208, 4),
    "H100:8": (3.0, 208, 8),
    "B200:8": (5.0, 224, 8),
    "v5e:16x16": (1.2, 112, 4),
    "v5p:4x8x8": (4.2, 208, 4),
}
FOR_GIANTS = ("v5e:16x16", "v5p:4x8x8")
COLUMNS = (
    "ms a step",
    "MFU",
    "peak, GiB",
    "MiB sent: waits + hidden",
    "images/s",
    "CPU ms there is",
    "chip-hours",
    "dollars",
)


def plan(recipe: str, topology: str, *, compiled: bool) -> dict | str:
    """The figures of the command `plan`, or the last line of its error."""
    price, _, _ = SLICES[topology]
    words = ["plan", f"--config={recipe.split()[0]}", *recipe.split()[1:], "--format=json"]
    words += [f"--topology={topology}", f"--price_per_chip_hour={price}", "--quiet"]
    words += [] if compiled else ["--no_compile"]
    job = subprocess.run(
        [sys.executable, "-m", "vit_jax.main", *words], capture_output=True, text=True
    )
    return json.loads(job.stdout) if job.stdout else job.stderr.strip().splitlines()[-1]


def row(recipe: str, topology: str, figures: dict) -> str:
    """A row of the table of one slice."""
    run, memory = figures["estimate"]["run"], figures["memory_bytes"]
    _, cpus, chips = SLICES[topology]
    cycles, by_kernel = figures["compiler_cycles"], figures["estimate"]["by_kernel"]
    sent = {True: 0.0, False: 0.0}
    for each in figures["collectives"] or ():
        sent[each["asynchronous"]] += each["sent_bytes"] / 2**20
    layers = "scan" if figures["scan"] else "unrolled"
    layers += "" if figures["remat"] == "none" else f", {figures['remat']} remat"
    layers += "" if figures["remat_layers"] is None else f" of {figures['remat_layers']}"
    mesh = " x ".join(f"{axis} {size}" for axis, size in figures["mesh"].items() if size > 1)
    verdict = "" if memory["fits"] else " (too much)"
    verdict = " (may not fit)" if memory["may_not_fit"] else verdict
    there_is = 1e3 * cpus / (run["images_per_s"] / figures["num_chips"] * chips)
    cells = (
        f"`{recipe.partition(' ')[0]}`",
        f"{figures['global_batch_size']:,}",
        f"{mesh}; {layers}",
        *([f"{cycles / 1e6:,.1f}"] if cycles else []),
        *([f"{1e3 * by_kernel['step_s']:,.1f}"] if by_kernel else []),
        f"{1e3 * run['step_s']:,.1f}",
        f"{run['mfu']:.0%}",
        f"{memory['peak'] / 2**30:.1f}{verdict}",
        f"{sent[False]:,.0f} + {sent[True]:,.0f}",
        f"{run['images_per_s']:,.0f}",
        f"{there_is:.1f}",
        f"{run['chip_hours']:,.0f}",
        f"{run['cost']:,.0f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", default="")
    parser.add_argument("--slice", choices=SLICES, action="append")
    parser.add_argument("words", nargs="*")
    flags = parser.parse_args()
    for topology in flags.slice or SLICES:
        recipes = GIANTS if topology in FOR_GIANTS else RECIPES
        chosen = [r for r in recipes if not flags.words or any(word in r for word in flags.words)]
        compiled = topology in flags.compile.split(",")
        own = "ms by kernels" if CHIPS[topology.partition(":")[0]].is_gpu else "Mcycles"
        heads = ("recipe", "batch", "layout", *([own] if compiled else []), *COLUMNS)
        print(f"\n## {topology}\n\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
        for recipe in chosen:
            figures = plan(recipe, topology, compiled=compiled)
            if isinstance(figures, str):
                print(f"{recipe} on {topology}: {figures}", file=sys.stderr)
            else:
                print(row(recipe, topology, figures), flush=True)


if __name__ == "__main__":
    main()
