"""Tar shards for tests."""

import io
import tarfile


def write_tar(path, members, tar_format=tarfile.PAX_FORMAT):
    """[(name, bytes, or a TarInfo without content)] in this order; a name may come twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in members:
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return path
