"""Files that appear whole or not at all: written beside their place, and named when complete.

Any thread and any process; of several that write one file, the last to finish gives it its name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def written_whole(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Yield what a file's bytes are written to; on an error the file is what it was.

    Args:
        mode: the permissions of the file, of which the umask takes some.

    Raises:
        OSError: it cannot be written.

    Example:
        >>> with written_whole(Path("run.json")) as file:     # doctest: +SKIP
        ...     file.write(b"{}")
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
