"""The command line and everything that starts processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("common", "launch", "scaling", "trainer", "models", "optim", "data")


def python_path() -> str:
    """PYTHONPATH for processes that must find our packages before a module of the user's of the same name."""
    return os.pathsep.join([str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


def own_packages_first() -> None:
    """Make sure that `import data` and the like find this project's packages and not modules of the user's.

    The packages have plain names, and Python looks in the working directory (`python -m`) and on PYTHONPATH before it
    looks at what is installed. Putting our folder first makes such modules harmless; one that was imported before we
    could act is named and ends the process with exit code 2.
    """
    if sys.path[:1] != [str(ROOT)]:
        sys.path.insert(0, str(ROOT))
    for name in PACKAGES:
        module = sys.modules.get(name)
        if module is None:
            continue
        folder = str(ROOT / name)
        places = [*(getattr(module, "__path__", None) or []), getattr(module, "__file__", None) or ""]
        if not any(str(place).startswith(folder) for place in places):
            print(
                f"gramian: {getattr(module, '__file__', name)} takes the place of gramian's own package '{name}'; "
                f"rename that file, or take its folder off PYTHONPATH",
                file=sys.stderr,
            )
            raise SystemExit(2)


own_packages_first()
