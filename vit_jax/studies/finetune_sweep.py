"""Learning-rate sweep on a development split, then several runs on the whole training split.

    dev_lr_0.003  dev_lr_0.01 ...      trained on study.train_split, scored on study.dev_split
              best of them
    lr_0.01_seed_0  lr_0.01_seed_1 ... trained on data.split, scored on the evaluator's own split

During the sweep the evaluator sees the development split instead of its own (the test split).

Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), appendix B.1.1: three runs, mean and deviation.
"""

from collections.abc import Mapping

from ml_collections import ConfigDict

from vit_jax.config import flatten
from vit_jax.errors import Faults, collect_faults
from vit_jax.studies.members import (
    DIVERGED,
    FINISHED,
    Member,
    Report,
    Result,
    Study,
    check_report,
    format_mean_std,
    mean_and_std,
    metric_in_percent,
    value_of,
)


def check(config: ConfigDict) -> None:
    """Raise InputError if the sections `study` and `evals` do not describe a sweep."""
    study, faults = config.study, Faults()
    lrs = study.peak_lrs
    if not lrs or len(set(lrs)) < len(lrs) or not all(lr > 0 for lr in lrs):
        faults.append(f"study.peak_lrs={lrs}: needs distinct positive numbers, e.g. 0.01,0.03")
    check_report(config, faults)
    if len(lrs) > 1:
        faults += [f"study.{key}: not set; needs a split of {config.data.name}"
                   for key in ("train_split", "dev_split") if not study[key]]  # fmt: skip
    name = study.metric.partition("/")[0]
    if list(config.evals) != [name] or "split" not in config.evals[name]:
        faults.append(
            f"evals: has {', '.join(config.evals) or 'none'}; a sweep needs exactly one evaluator, "
            f"{name!r} of study.metric={study.metric!r}, with one split, so that no other sees the "
            "test split"
        )
    elif study.dev_split == config.evals[name].split:
        faults.append(f"study.dev_split={study.dev_split!r}: is also the split of evals.{name}, "
                      "which the study reports; choose another")  # fmt: skip
    collect_faults(faults)


def find_members(config: ConfigDict, results: Mapping[str, Result]) -> list[Member]:
    """The runs of the sweep and, once they have all ended, the final runs with the best rate."""
    choices = _choices(config)
    best = best_lr(config, results)
    return list(choices.values()) + ([] if best is None else _final_runs(config, best))


def _choices(config: ConfigDict) -> dict[float, Member]:
    """{learning rate: its member}; {} if there is only one rate."""
    study = config.study
    if len(study.peak_lrs) == 1:
        return {}
    splits = {"data.split": study.train_split, _split_key(config): study.dev_split}
    return {
        lr: Member(f"dev_lr_{lr}", {"optimizer.peak_lr": str(lr), **splits})
        for lr in study.peak_lrs
    }


def _split_key(config: ConfigDict) -> str:
    return f"evals.{config.study.metric.partition('/')[0]}.split"


def _final_runs(config: ConfigDict, lr: float) -> list[Member]:
    seeds = range(config.seed, config.seed + config.study.seeds)
    return [
        Member(f"lr_{lr}_seed_{seed}", {"optimizer.peak_lr": str(lr), "seed": str(seed)})
        for seed in seeds
    ]


def best_lr(config: ConfigDict, results: Mapping[str, Result]) -> float | None:
    """The best learning rate of the sweep; the lowest of equally good ones.

    None until all runs of the sweep have ended, or if all have diverged.
    """
    choices = _choices(config)
    if not choices:
        return config.study.peak_lrs[0]
    ended = {lr: results.get(member.name) for lr, member in choices.items()}
    if any(result is None or result.state not in (FINISHED, DIVERGED) for result in ended.values()):
        return None
    values = {lr: value_of(config, result) for lr, result in ended.items()}
    return max(
        (lr for lr in sorted(values) if values[lr] is not None), key=values.get, default=None
    )


def report(config: ConfigDict, results: Mapping[str, Result]) -> Report:
    """A row for each member, then mean and sample standard deviation of the final runs."""
    best, choices = best_lr(config, results), _choices(config)
    final_runs = [] if best is None else _final_runs(config, best)
    split_key = _split_key(config)
    test_split = flatten(config)[split_key]
    rows = []
    for member in [*choices.values(), *final_runs]:
        value = value_of(config, results.get(member.name))
        state = results[member.name].state if member.name in results else "waits"
        rows.append([
            member.name, member.overrides["optimizer.peak_lr"],
            member.overrides.get("seed", str(config.seed)),
            member.overrides.get(split_key, test_split),
            state if value is None else f"{100 * value:.2f}",
        ])  # fmt: skip
    summaries = [
        results[run.name].summary
        for run in final_runs
        if value_of(config, results.get(run.name)) is not None
    ]
    names = [name for name, value in summaries[0].items() if "/" in name] if summaries else []
    metrics = {name: mean_and_std([summary[name] for summary in summaries]) for name in names}
    if metrics:
        seeds = f"{len(summaries)} of {len(final_runs)}"
        rows.append(
            [
                "mean ± std",
                str(best),
                seeds,
                test_split,
                format_mean_std(metrics[config.study.metric], ""),
            ]
        )
    values = {
        "metric": config.study.metric,
        "peak_lr": best,
        "dev": {str(lr): value_of(config, results.get(m.name)) for lr, m in choices.items()},
        "seeds": len(summaries),
        "metrics": metrics,
    }
    columns = ["member", "peak_lr", "seed", "scored on", metric_in_percent(config)]
    return Report(columns, rows, values, complete=len(summaries) == config.study.seeds)


STUDY = Study(lambda config: ("optimizer.peak_lr",), check, find_members, report)
