"""The table of a grid of runs, its choices and fine-tunings, from the results of its members."""

import io
import pathlib

import numpy as np
import pytest
from etils import epath
from PIL import Image
from studied import (
    config_of,
    csv_of,
    done,
    keys_at_fault,
    names_of,
    overrides_of,
    report_of,
    study_of,
)

from vit_jax.config import classification, key
from vit_jax.config.text import load_config
from vit_jax.studies import figures, running
from vit_jax.studies.engine import Result, Study
from vit_jax.studies.figures import find_curves
from vit_jax.studies.tables import DIVERGED, Measured

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
CELLS = (
    "no positions | stem: model.pos_embed=none",
    "1-D | stem: model.pos_embed=learned_1d; model.pos_embed_at=stem",
    "1-D | every layer: model.pos_embed=learned_1d; model.pos_embed_at=layers",
)


def grid_of(cells=CELLS, seeds=2):
    c = config_of("grid", cells=cells, seeds=seeds)
    c.seed = 5
    return c


def test_members_are_the_cells_seed_by_seed():
    members = overrides_of(grid_of())
    assert list(members) == [
        f"{cell}__seed_{seed}"
        for seed in (5, 6)
        for cell in ("no_positions__stem", "1-D__stem", "1-D__every_layer")
    ]
    assert members["1-D__stem__seed_6"] == {
        "model.pos_embed": "learned_1d", "model.pos_embed_at": "stem", "seed": "6",
    }  # fmt: skip
    assert study_of(grid_of()).sets == {"model.pos_embed", "model.pos_embed_at"}


def test_table_has_means_deviations_and_what_is_not_there():
    config = grid_of()
    results = {
        "no_positions__stem__seed_5": done(0.3, exaflops=1e-6),
        "no_positions__stem__seed_6": done(0.32),
        "1-D__stem__seed_5": done(0.4),
        "1-D__every_layer__seed_5": Result(DIVERGED, {}, "step 3: loss is nan"),
    }
    report = report_of(config, results)
    assert report.columns == ["held_out/top1, %", "stem", "every layer"]
    assert report.texts == [
        ["1-D", "40.00 (1 of 2)", "diverged"],  # the best first
        ["no positions", "31.00 ± 1.41", "-"],
    ]
    assert report.best.names == ["1-D__stem__seed_5"]
    assert not report.is_complete and {*report.files} == {"study.png", "study.pdf"}
    rows = csv_of(config, results)
    assert [(r["row"], r["column"], r["seed"], r["state"], r["held_out/top1"]) for r in rows] == [
        ("no positions", "stem", "5", "finished", "0.3"),
        ("1-D", "stem", "5", "finished", "0.4"),
        ("1-D", "every layer", "5", "diverged", ""),
        ("no positions", "stem", "6", "finished", "0.32"),
    ]
    assert rows[0]["exaflops"] == "1e-06" and rows[0]["images_seen"] == ""
    whole = dict.fromkeys(names_of(config), done(0.5))
    assert report_of(config, whole).is_complete and not report_of(config, {}).is_complete


def test_columns_that_are_numbers_are_drawn_without_rows_that_have_no_value():
    some, none = Measured([0.25, 0.25]), Measured([None])
    table = {"top1": {"A": {"30 images": some, "1000 images": some},
                      "B": {"1000 images": none}}}  # fmt: skip
    places = [(30.0, [25.0, 25.0]), (1000.0, [25.0, 25.0])]
    assert find_curves(table) == ({"top1": {"A": places}}, "images")
    for columns in (["30 images"], ["30 images", "2 hours"], ["stem", "every layer"]):
        assert find_curves({"top1": {"A": dict.fromkeys(columns, some)}}) == ({}, "")


def test_columns_that_are_names_have_means_and_deviations(monkeypatch):
    monkeypatch.setattr(figures, "_as_files", lambda figure: figure)
    cells = {"stem": Measured([0.2, 0.4]), "every layer": Measured([0.5]), "no": Measured([None])}
    figure = figures.draw_table({"val/top1, %": {"A": cells}})
    note = "± is the sample standard deviation over n=2 seeds"
    assert figure.get_supxlabel() == note
    (axes,) = figure.axes
    (bar,) = axes.containers
    spans = [sorted(segment[:, 1]) for segment in bar.lines[2][0].get_segments() if len(segment)]
    deviation = 100 * np.std([0.2, 0.4], ddof=1)
    np.testing.assert_allclose(spans, [[30 - deviation, 30 + deviation]])
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert (labels, axes.get_ylabel()) == (["stem", "every layer"], "val top1, %")
    assert figures.draw_table({"val/top1, %": {"A": {"stem": Measured([0.2])}}}) == {}


@pytest.mark.parametrize(
    "name", ["position_ablation", "bit_and_vit", "blocks_of_today", "adamw_muon_lamb"]
)
@pytest.mark.parametrize("words", ["", ":debug"])
def test_all_members_of_the_configs_can_be_run(name, words, tmp_path):
    """Their overrides are valid and their models exist."""
    file = f"{CONFIGS / name}.py{words}"
    study = study_of(load_config(file))
    study.check_all()
    call = running.Call(file, [], epath.Path(tmp_path), None, again=False)
    members = study.members({})
    quiet = {running.member_words(call._replace(quiet=q), members[0])[-1] for q in (True, False)}
    assert quiet == {"--quiet", f"--workdir={tmp_path}/{members[0].name}"}
    assert len(members) == study.config.study.seeds * len(study.cells) >= 3
    running.check_members(study, call, members)


def test_a_study_names_its_entries_by_its_key():
    class Own(Study):
        """Runs by name."""

        settings: tuple[str, ...] = key((), "runs by name", form="entries")
        others: tuple[str, ...] = key((), "no entries")

    study = Own(settings=("first: model.depth=1; seed=2",), others=("a",))
    assert study.entries == {"settings": {("first",): {"model.depth": "1", "seed": "2"}}}


def test_two_cells_that_would_share_a_workdir_and_an_unknown_evaluator():
    assert {*keys_at_fault(grid_of(("a b | c: model.depth=1", "a_b | c: model.depth=2")))} == {
        "study"
    }
    config = grid_of()
    config.study.metric = "held/top1"
    assert keys_at_fault(config) == ["study.metric"]


@pytest.fixture
def tuned():
    """A config whose cells choose, and then fine-tune."""
    c = config_of("grid", seeds=2, metric="dev/top1", choose_by="dev/top1")
    c.study.cells = tuple(f"ViT | {n} images: data.subset={n}; model.name=ViT-mu/4"
                          for n in (10, 100))  # fmt: skip
    c.study.candidates = ("weak: optimizer.weight_decay=0.03", "strong: model.dropout=0.1")
    c.study.finetune = "data.classes=5,6; duration=9 steps"
    c.study.finetune_metric = "held_out/top1"
    c.evals.dev = classification(split="train[90%:]", every="1 epochs")
    return c


def of_dev(dev, test=0.0, **more):
    return done(test, **{"dev/top1": dev}, **more)


FIRST = {
    "ViT__10_images__weak__seed_0": of_dev(0.2),
    "ViT__100_images__weak__seed_0": of_dev(0.6),
    "ViT__10_images__strong__seed_0": of_dev(0.3),
    "ViT__100_images__strong__seed_0": Result(DIVERGED),
}


def test_each_cell_keeps_its_best_candidate_for_the_other_seeds_and_fine_tuning(tuned):
    study_of(tuned).check_all()
    assert names_of(tuned) == list(FIRST)
    some = {name: FIRST[name] for name in list(FIRST)[:3]}
    assert "ViT__100_images__weak__seed_1" not in names_of(tuned, some)
    members = overrides_of(tuned, FIRST)
    assert list(members)[4:] == [
        "ViT__10_images__strong__seed_1",
        "ViT__100_images__weak__seed_1",
        "ViT__10_images__strong__seed_0__finetuned",
        "ViT__100_images__weak__seed_0__finetuned",
    ]
    assert members["ViT__100_images__weak__seed_0__finetuned"] == {
        # the model of its cell, but neither its data nor its candidate
        "model.name": "ViT-mu/4", "data.classes": "5,6", "duration": "9 steps", "seed": "0",
        "init_from": "/w/ViT__100_images__weak__seed_0",
    }  # fmt: skip
    planned = [m.name for m in study_of(tuned).all_members()]
    assert len(planned) == 4 + 2 + 4


def test_the_report_has_a_row_for_each_measure(tuned):
    tuned.study.seeds = 1
    results = FIRST | {"ViT__10_images__strong__seed_0__finetuned": of_dev(0.1, 0.4)}
    report = report_of(tuned, results)
    assert report.texts == [
        ["ViT", "dev/top1, %", "30.00 [strong]", "60.00 [weak]"],
        ["ViT", "fine-tuned: held_out/top1, %", "40.00 [strong]", "waits [weak]"],
    ]
    assert not report.is_complete
    assert [row["part"] for row in csv_of(tuned, results)] == ["trained"] * 4 + ["fine-tuned"]
    with Image.open(io.BytesIO(report.files["study.png"])) as image:
        assert image.width > 400 and len(set(image.convert("L").tobytes())) > 50


def test_the_best_step_counts_where_that_is_asked_for(tuned):
    tuned.study.point, tuned.study.candidates, tuned.study.seeds = "best", (), 1
    tuned.checkpoint.keep_best = "dev/top1"
    name = "ViT__10_images__seed_0"
    best = {"step": 7, "dev/top1": 0.5, "held_out/top1": 0.25}
    results = {name: of_dev(0.1, 0.9, best=best)}
    assert report_of(tuned, results).texts[0][2] == "50.00"
    (row,) = csv_of(tuned, results)
    assert (row["dev/top1"], row["held_out/top1"]) == ("0.5", "0.25")
    finetuned = overrides_of(tuned, results)[f"{name}__finetuned"]
    assert finetuned["init_from"] == f"/w/{name}/checkpoints/7"
    # Another step of a fine-tuning is the best one, and what finds it is measured there.
    tuned.study.finetune += "; checkpoint.keep_best=held_out/top1; evals.held_out.every=2 steps"
    study_of(tuned).check_all()
    del best["dev/top1"]  # as if it was not measured at that step
    assert report_of(tuned, results).texts[0][2] == "without dev/top1"


def test_what_is_refused(tuned):
    tuned.study.finetune, tuned.study.finetune_metric = "data.clases=5,6", None
    tuned.study.point, tuned.study.choose_by = "best", "devel/top1"
    assert keys_at_fault(tuned) == [
        "study.finetune_metric", "study.point", "study.choose_by"
    ]  # fmt: skip
    tuned.study.choose_by, tuned.checkpoint.keep_best = None, "dev/top1"
    tuned.study.metric, tuned.evals.held_out.every = "held_out/top1", "2 epochs"
    assert {"study.choose_by", "study.metric"} <= {*keys_at_fault(tuned)}


def test_a_wrong_key_of_the_last_stage_is_told_before_the_first(tuned):
    tuned.study.finetune = "data.clases=5,6"
    assert keys_at_fault(tuned) == ["--config.data.clases"]


def test_nothing_is_chosen_by_the_data_that_are_reported(tuned):
    tuned.evals.dev.split, tuned.study.metric = "test", "held_out/top1"
    assert keys_at_fault(tuned) == ["study.choose_by"]
    tuned.study.metric = "dev/top1"  # reported as what it is; the fine-tuning has other classes
    study_of(tuned).check_all()
