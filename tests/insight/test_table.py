"""The CSV file with a row for each model."""

import pytest
from etils import epath

from vit_jax.errors import InputError
from vit_jax.insight.table import add_row


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
