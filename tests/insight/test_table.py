"""The CSV file with a row for each model."""

import pytest
from etils import epath

from vit_jax.errors import InputError
from vit_jax.insight.table import add_row, check_table
from vit_jax.main import main


def test_one_row_for_each_model(tmp_path):
    path = epath.Path(tmp_path / "t.csv")
    add_row(path, "runs/a", {"v2/top1": 0.5, "a/top1": None})
    add_row(path, "runs/b", {"v2/top1": 0.75, "r/top1": 0.25})
    add_row(path, "runs/a", {"v2/top1": 0.6})
    assert path.read_text() == "model,v2/top1,r/top1\nruns/a,0.6,\nruns/b,0.75,0.25\n"
    other = epath.Path(tmp_path / "other.csv")
    other.write_text("x,y\n1,2\n")
    with pytest.raises(InputError, match="has no column 'model'"):
        add_row(other, "runs/a", {"v2/top1": 0.6})
    picture = epath.Path(tmp_path / "picture.csv")
    picture.write_bytes(b"\x89PNG\xff")
    with pytest.raises(InputError, match="cannot be read"):
        check_table(picture)


def test_a_wrong_table_is_refused_before_the_model_is_read(tmp_path, capsys):
    (tmp_path / "other.csv").write_text("x,y\n1,2\n")
    words = ["evaluate", "--config=evaluate:knn,debug", "--init_from=absent.npz"]
    assert main([*words, f"--table={tmp_path / 'other.csv'}"]) == 2
    assert "has no column 'model'" in capsys.readouterr().err
