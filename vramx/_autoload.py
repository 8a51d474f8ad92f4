"""What torch calls at the end of every `import torch`, through the entry point torch.backends.

With VRAMX=1 it arranges for the allocator to be installed just before CUDA is initialised, once a
process, however often it is called; without, it does nothing but look the variable up, and leaves
no module behind, so that an import of vramx that the program has later is seen as the first. An
exception here would break `import torch` for everybody, so none gets out: a failure is one warning
and the program goes on with torch's own allocator.
"""

from __future__ import annotations

import logging
import sys
import warnings

from vramx import config
from vramx.errors import VramxWarning

_IMPORTED_HERE = frozenset({"vramx", "vramx._autoload", "vramx.config", "vramx.errors"})


def _autoload() -> None:
    """Install the allocator before CUDA is initialised, where VRAMX=1 asks for it."""
    try:
        if config.is_enabled():
            _prepare()
        else:
            _leave()
    except Exception as error:
        _warn(error)


def _leave() -> None:
    """Take out what was imported for this call, unless the program or another library did it."""
    ours = [name for name in sys.modules if name.partition(".")[0] == "vramx"]
    if sys.modules["vramx"]._IS_TORCHS and _IMPORTED_HERE.issuperset(ours):
        for name in ours:
            del sys.modules[name]


def _prepare() -> None:
    settings = config.config()  # a bad value is told now, not at the first use of CUDA
    if settings.enabled:
        from vramx.allocator import cuda_init

        cuda_init.run_before(_install)


def _install() -> None:
    # Imported here: a process that never uses CUDA needs none of it.
    from vramx.allocator import install, watching

    settings = config.config()
    try:
        if settings.allocator == "vramx" and not install.allocator_installed():
            # Late, because torch's allocator may have been initialised behind torch.cuda's back, as
            # torch.cuda.memory._record_memory_history does.
            install.install_allocator(strict=settings.strict, late=True)
    except Exception as error:
        _warn(error)
    if not install.allocator_installed():
        watching.start(sys.modules["torch"], records=settings.record)


def _warn(error: Exception) -> None:
    """Say in one line that the native allocator stays."""
    reason = " ".join(str(error).split()) or type(error).__name__
    text = f"the allocator is not installed, torch's own stays: {reason}"
    try:
        # A made-up place, so that no line of source is printed below the text.
        warnings.warn_explicit(text, VramxWarning, "vramx", 0)
    except Exception:  # the program turns warnings into errors, or replaced their printing
        logging.getLogger("vramx").warning("vramx: %s", text)
