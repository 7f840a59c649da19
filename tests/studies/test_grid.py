"""The table of a grid of runs, from the results of its members."""

import csv
import io
import pathlib

import pytest
from etils import epath
from PIL import Image

from vit_jax.config import base_config, classification
from vit_jax.config.text import load_config
from vit_jax.errors import InputError
from vit_jax.studies import grid, running
from vit_jax.studies.members import DIVERGED, FINISHED, Result

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
CELLS = (
    "no positions | stem: model.pos_embed=none",
    "1-D | stem: model.pos_embed=learned_1d; model.pos_embed_at=stem",
    "1-D | every layer: model.pos_embed=learned_1d; model.pos_embed_at=layers",
)
BY_DATA = tuple(
    f"{model} | {images} images: model.name={model}; data.split=train[:{images}]"
    for model in ("ViT-mu/4", "ViT-Ti/4")
    for images in (1000, 30)
)


def config_of(cells=CELLS, seeds=2):
    c = base_config()
    c.study.name, c.study.cells, c.study.seeds = "grid", cells, seeds
    c.seed = 5
    c.evals.held_out = classification(split="test", every="1 epochs")
    return c


def results_of(config, accuracy):
    """{member: its result}, `accuracy`(row, column, seed)."""
    return {
        cell.member(seed).name: Result(
            FINISHED,
            {"step": 9, "held_out/top1": accuracy(cell.row, cell.column, seed), "exaflops": 1e-6},
        )
        for cell in grid.parse_cells(config.study.cells)
        for seed in range(config.seed, config.seed + config.study.seeds)
    }


def test_members_are_the_cells_seed_by_seed():
    config = config_of()
    members = grid.find_members(config, {})
    assert [m.name for m in members] == [
        f"{cell}__seed_{seed}"
        for seed in (5, 6)
        for cell in ("no_positions__stem", "1-D__stem", "1-D__every_layer")
    ]
    assert members[4].overrides == {
        "model.pos_embed": "learned_1d", "model.pos_embed_at": "stem", "seed": "6",
    }  # fmt: skip
    assert grid.find_keys(config) == {"model.pos_embed", "model.pos_embed_at"}


def test_a_metric_that_no_evaluator_gives():
    config = config_of()
    config.study.metric = "held/top1"
    with pytest.raises(InputError, match=r"study\.metric='held/top1': no such evaluator; did y"):
        grid.STUDY.check(config)


def test_a_row_without_values_is_not_drawn(monkeypatch):
    drawn = {}

    def draw(points, **labels):
        drawn.update(points, **labels)
        return b""

    monkeypatch.setattr(grid, "draw_curves", draw)
    config = config_of()
    config.study.cells = ("A | 1 images: seed_=1", "A | 2 images: seed_=2", "B | 1 images: x=1")
    results = results_of(config, lambda row, column, seed: 0.25)
    results = {name: result for name, result in results.items() if name.startswith("A")}
    assert "study.png" in grid.report(config, results).files
    places = [(1.0, [25.0, 25.0]), (2.0, [25.0, 25.0])]
    assert drawn == {"A": places, "x_label": "images", "y_label": "held_out/top1, %"}


def test_table_has_means_deviations_and_what_is_not_there():
    config = config_of()
    results = results_of(
        config, lambda row, column, seed: 0.3 + 0.1 * (row == "1-D") + 0.02 * (seed - 5)
    )
    late, lost = "1-D__stem__seed_6", "1-D__every_layer__seed_5"
    results[lost] = Result(DIVERGED, {}, "step 3: loss is nan")
    del results[late], results["1-D__every_layer__seed_6"]
    report = grid.report(config, results)
    assert report.columns == ["held_out/top1, %", "stem", "every layer"]
    assert report.rows == [
        ["no positions", "31.00 ± 1.41", "-"],
        ["1-D", "40.00 (1 of 2)", "diverged"],
    ]
    assert not report.complete and "study.png" not in report.files
    rows = list(csv.DictReader(io.StringIO(report.files["study.csv"].decode())))
    assert [(r["row"], r["column"], r["seed"], r["state"], r["held_out/top1"]) for r in rows] == [
        ("no positions", "stem", "5", "finished", "0.3"),
        ("no positions", "stem", "6", "finished", "0.32"),
        ("1-D", "stem", "5", "finished", "0.4"),
        ("1-D", "every layer", "5", "diverged", ""),
    ]
    assert rows[0]["exaflops"] == "1e-06" and rows[0]["images_seen"] == ""


def test_whole_table_is_complete():
    config = config_of(seeds=1)
    report = grid.report(config, results_of(config, lambda row, column, seed: 0.5))
    assert report.complete
    assert report.values["cells"][1] == {
        "row": "1-D", "column": "stem", "mean": 0.5, "std": None, "values": [0.5],
    }  # fmt: skip
    assert not grid.report(config, {}).complete


def test_columns_that_are_numbers_make_a_picture():
    config = config_of(BY_DATA)
    report = grid.report(config, results_of(config, lambda row, column, seed: 0.1 * seed))
    with Image.open(io.BytesIO(report.files["study.png"])) as picture:
        assert picture.width > 400 and len(set(picture.convert("L").tobytes())) > 50
    assert grid.report(config, {}).files.keys() == {"study.csv"}  # nothing to draw yet


def test_axis():
    assert grid.parse_axis(["1000 images", "30 images"]) == (
        [(30.0, "30 images"), (1000.0, "1000 images")], "images",
    )  # fmt: skip
    for columns in (["30 images"], ["30 images", "2 hours"], ["stem", "every layer"]):
        assert grid.parse_axis(columns) is None


@pytest.mark.parametrize("name", ["position_ablation", "bit_and_vit"])
@pytest.mark.parametrize("words", ["", ":debug"])
def test_all_members_of_the_configs_can_be_run(name, words, tmp_path):
    """Their overrides are valid and their models exist."""
    file = f"{CONFIGS / name}.py{words}"
    config = load_config(file)
    call = running.Call(file, [], epath.Path(tmp_path), None, again=False)
    members = grid.find_members(config, {})
    quiet = {running.member_words(call._replace(quiet=q), members[0])[-1] for q in (True, False)}
    assert quiet == {"--quiet", f"--workdir={tmp_path}/{members[0].name}"}
    assert len(members) == config.study.seeds * len(config.study.cells) >= 4
    for member in members:
        running.check_member(config, call, member)


@pytest.mark.parametrize(
    ("cells", "parts"),
    [
        ((), ["study.cells: is empty", 'needs "row | column: key=value']),
        (("row: a=b",), ["study.cells: 'row: a=b'", "needs"]),
        (("row | column",), ["'row | column'"]),
        (("a | b: x=1; x =2",), ["'a | b: x=1; x =2'", "sets a key twice"]),
        (("a | b: model.width", "| b: c=d"), ["'a | b: model.width'", "'| b: c=d'"]),
        (("a | b: x=1", "a  | b: x=2"), ["two cells share the runs a__b__seed_SEED"]),
        (("a | b: seed=1",), ["study.cells: must not set seed", "study.seeds"]),
    ],
)
def test_wrong_cells_are_named(cells, parts):
    with pytest.raises(InputError) as error:
        grid.check(config_of(cells))
    assert all(part in str(error.value) for part in parts)
