import pytest
from etils import epath

from vit_jax.files import write_whole


@pytest.mark.parametrize(
    ("content", "stored"),
    [("é\n", b"\xc3\xa9\n"), (b"\x89PNG\r\n\x00\xff", b"\x89PNG\r\n\x00\xff"), (b"", b"")],
)
def test_a_file_is_replaced_whole_by_text_or_bytes(tmp_path, content, stored):
    path = epath.Path(tmp_path) / "file"
    path.write_bytes(b"what was there before, and longer")
    write_whole(path, content)
    assert path.read_bytes() == stored
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
