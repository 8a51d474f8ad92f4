"""Names torchvision's operators where its compiled part cannot be loaded: beside a torch for CPUs.

The wheels of the package index are built for CUDA, and importing one fails at the first operator
that is not there. Models need none of them. So the operators get names here, and calling one fails.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

_kept: list[Any] = []  # the names go with the library


def name_missing() -> None:
    """Name the operators that `import torchvision` asks for, where torch cannot load them."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return
    folder = Path(spec.submodule_search_locations[0])
    import torch

    for_cuda = "+cpu" not in (folder / "version.py").read_text()
    if torch.version.cuda is not None or not for_cuda:
        return
    text = (folder / "_meta_registrations.py").read_text()
    names = re.findall(r'register_meta\("(\w+)"|register_fake\("torchvision::(\w+)"', text)
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in sorted({one or other for one, other in names}):
        library.define(f"{name}(Tensor x) -> Tensor")
    _kept.append(library)
