"""Trains `cifar10:fast` and `hour`, and measures parts: docs/explanation/cifar10_fast.csv.

python tools/cifar10_fast.py WORKDIR --data_dir=DIR [--seeds=5] [--form=hour] [--form=fast,held_out]

The forms `fast` and `hour` train on all of train and read the test split once. `fast,held_out`
trains on nine tenths of train for about 155 CPU seconds, as it is and with other parts, and reads
the last tenth.
Runs that the CSV has are not run again; one that was stopped begins anew.
"""

import pathlib

from measured_runs import ROOT, add_row, has_row, make_parser, train

TABLE = ROOT / "docs/explanation/cifar10_fast.csv"
WHOLE, OF_PARTS = "the recipe", "fast,held_out"
# {run: (steps that take as many CPU seconds, its flags)}
PARTS = {
    WHOLE: (450, ""),
    "a stem of five convolutions": (380, "model.stem_channels=32,32,64,64,128"),
    "no convolutions": (640, "model.name=ViT-Ti/8 model.stem_channels=None"),
    "AdamW at 0.001": (520, "optimizer.name=adamw optimizer.peak_lr=0.001"),
    "no label smoothing": (450, "loss.label_smoothing=0"),
    "no crops, no flips": (460, "data.ops=decode"),
}


def run(form: str, flags: list[str], workdir: pathlib.Path) -> dict:
    """Train once: CPU seconds of the whole process, training's PFLOP, and accuracy in per cent."""
    summary, cpu_s = train([f"--config=cifar10:{form}", *flags], workdir)
    entry = "held_out" if form == OF_PARTS else "test"
    accuracy = {name: 100 * summary[f"{entry}/{name}"] for name in ("top1", "top1_flips")}
    pflop = 1e3 * summary["exaflops"]
    return {"steps": summary["step"], "cpu_s": cpu_s, "pflop": pflop, **accuracy}


def main() -> None:
    parser = make_parser(__doc__, seeds=5)
    parser.add_argument("--form", default="fast", choices=("fast", "hour", OF_PARTS))
    args = parser.parse_args()
    work, data_dir = args.workdir, args.data_dir
    work.mkdir(parents=True, exist_ok=True)
    runs = PARTS if args.form == OF_PARTS else {WHOLE: (0, "")}
    for seed in map(str, range(args.seeds)):
        for name, (steps, keys) in runs.items():
            place = {"form": args.form, "run": name, "seed": seed}
            if has_row(TABLE, place):
                print(f"{place}: {TABLE} has it", flush=True)
                continue
            keys += f" data.data_dir={data_dir} seed={seed}"
            flags = [f"--config.{key}" for key in keys.split()]
            flags += [f"--config.duration={steps} steps"] * (steps > 0)
            workdir = work / "_".join(place.values()).replace(" ", "_")
            add_row(TABLE, place | run(args.form, flags, workdir))


if __name__ == "__main__":
    main()
