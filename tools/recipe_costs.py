"""Plans the recipes as they stand, and writes vit_jax/planning/recipe_costs.csv.

python tools/recipe_costs.py [--compile=v5e:4x4,H100:8] [--slice=v5e:4x4] [WORD...]
python docs/hooks.py   # puts the tables into docs/explanation/recipe_costs.md

The compiler plans the slices of --compile; others are calculated. Only recipes that contain one of
the WORDs are planned; other rows of the table stay. A plan is cached, so the second call takes
seconds.
"""

import argparse
import json
import subprocess
import sys

from vit_jax.base.files import write_whole
from vit_jax.insight.tables import as_csv
from vit_jax.planning.recipe_costs import TABLE, read_costs

DATA = "--config.data.num_classes=18291 --config.data.num_examples=303000000"  # JFT-300M
LARGER = "--config.data.num_classes=29593 --config.data.num_examples=3000000000"  # JFT-3B
PAIRS = "--config.data.num_classes=1 --config.data.num_examples=1000000000"
OWN = "--config.data.num_classes=10 --config.data.num_examples=50000"  # pictures of your own
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
    f"siglip:ViT-B/16 {PAIRS}",
    f"clip {PAIRS}",
    f"lit {PAIRS} {SCRATCH} --config.model.name=ViT-B/16 --config.data.image_size=224",
    f"captions:ViT-B/16 {PAIRS}",
    "ibot",
    f"selfsup:ViT-S/16 {OWN} {SCRATCH}",
    f"selfsup:folder {OWN}",
    f"folder {OWN}",
    f"folder:ViT-S/16 {OWN}",
    f"words:folder {PAIRS}",
    "distillation:bit",
    "quickstart",
)
GIANTS = tuple(f"giant:ViT-{size}/14,jft=jft3b {LARGER}" for size in ("g", "G", "22B"))
# {slice: (CPUs of a host, chips of a host)}
SLICES = {
    "v5e:4x4": (112, 4),
    "v6e:4x4": (180, 4),
    "v5p:4x4x4": (208, 4),
    "H100:8": (208, 8),
    "B200:8": (224, 8),
    "v5e:16x16": (112, 4),
    "v5p:4x8x8": (208, 4),
}
ALSO_GIANTS, ONLY_GIANTS = ("H100:8", "B200:8"), ("v5e:16x16", "v5p:4x8x8")


def plan(recipe: str, topology: str, *, compiled: bool) -> dict | str:
    """The figures of the command `plan`, or the last line of its error."""
    words = ["plan", f"--config={recipe.split()[0]}", *recipe.split()[1:], "--format=json"]
    words += [f"--topology={topology}", "--quiet", *([] if compiled else ["--no_compile"])]
    job = subprocess.run(
        [sys.executable, "-m", "vit_jax.main", *words], capture_output=True, text=True
    )
    return json.loads(job.stdout) if job.stdout else job.stderr.strip().splitlines()[-1]


def row(recipe: str, topology: str, figures: dict) -> dict[str, str]:
    """A row of the table; a chip sends its MiB in a step."""
    run, memory = figures["estimate"]["run"], figures["memory_bytes"]
    cpus, chips = SLICES[topology]
    cycles, by_kernel = figures["compiler_cycles"], figures["estimate"]["by_kernel"]
    sent = {True: 0.0, False: 0.0}
    for each in figures["collectives"] or ():
        sent[each["asynchronous"]] += each["sent_bytes"] / 2**20
    layers = "scan" if figures["scan"] else "unrolled"
    layers += "" if figures["remat"] == "none" else f", {figures['remat']} remat"
    layers += "" if figures["remat_layers"] is None else f" of {figures['remat_layers']}"
    layers += f", {n} microbatches" if (n := figures["accum_steps"]) > 1 else ""
    mesh = " x ".join(f"{axis} {size}" for axis, size in figures["mesh"].items() if size > 1)
    cpu_s = cpus / (run["images_per_s"] / figures["num_chips"] * chips)
    return {
        "by": figures["by"],
        "slice": topology,
        "recipe": recipe.partition(" ")[0],
        "batch": f"{figures['global_batch_size']}",
        "layout": f"{mesh}; {layers}",
        "mcycles": f"{cycles / 1e6:.1f}" if cycles else "",
        "kernels_ms": f"{1e3 * by_kernel['step_s']:.1f}" if by_kernel else "",
        "step_ms": f"{1e3 * run['step_s']:.1f}",
        "mfu": f"{run['mfu']:.2f}",
        "peak_gib": f"{memory['peak'] / 2**30:.1f}",
        "fits": "maybe" if memory["may_not_fit"] else "yes" if memory["fits"] else "no",
        "waits_mib": f"{sent[False]:.0f}",
        "hidden_mib": f"{sent[True]:.0f}",
        "images_per_s": f"{run['images_per_s']:.0f}",
        "cpu_ms": f"{1e3 * cpu_s:.1f}",
        "chip_hours": f"{run['chip_hours']:.4g}",
        "time_by": run["by"],
    }


def write_table(found: list[dict[str, str]]) -> None:
    """Put `found` in the place of the rows of the same recipe, slice and `by`, or at the end."""
    rows = {(row["by"], row["slice"], row["recipe"]): row for row in (*read_costs(), *found)}
    order = [(by, topology) for by in ("calculation", "compiler") for topology in SLICES]
    found = sorted(rows.values(), key=lambda row: order.index((row["by"], row["slice"])))
    write_whole(TABLE, as_csv([found[0], *(row.values() for row in found)]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", default="")
    parser.add_argument("--slice", choices=SLICES, action="append")
    parser.add_argument("words", nargs="*")
    flags = parser.parse_args()
    for topology in flags.slice or SLICES:
        recipes = () if topology in ONLY_GIANTS else RECIPES
        giants = GIANTS if topology in (*ALSO_GIANTS, *ONLY_GIANTS) else ()
        for recipe in (*recipes, *giants):
            if flags.words and not any(word in recipe for word in flags.words):
                continue
            figures = plan(recipe, topology, compiled=topology in flags.compile.split(","))
            if isinstance(figures, str):
                print(f"{recipe} on {topology}: {figures}", file=sys.stderr)
            else:
                write_table([row(recipe, topology, figures)])


if __name__ == "__main__":
    main()
