"""Faults: a module of ours with one line written wrongly, or as processes are to find it; files that find no room."""

from __future__ import annotations

import importlib
import inspect
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


@contextmanager
def one_line_fault(module_name: str, right: str, wrong: str) -> Iterator[None]:
    """Until the context ends, the functions of a module are those of its source with `right` replaced by `wrong`.

    Their code is swapped in place, so that also those who have imported a function by its name run the faulty one.
    """
    module = importlib.import_module(module_name)
    source = inspect.getsource(module)
    assert source.count(right) == 1, f"{module_name} has the line {source.count(right)} times; mend the fault"
    faulty: dict[str, Any] = {"__name__": module_name}
    exec(compile(source.replace(right, wrong), str(module.__file__), "exec"), faulty)
    pairs = [
        (ours, theirs)
        for name, value in faulty.items()
        for ours, theirs in _functions(module, getattr(module, name, None), value)
        if ours.__code__ != theirs.__code__
    ]
    assert pairs, "the fault is in no function"
    with ExitStack() as stack:
        for ours, theirs in pairs:
            stack.callback(setattr, ours, "__code__", ours.__code__)
            ours.__code__ = theirs.__code__
        yield


def _functions(module: ModuleType, ours: Any, theirs: Any) -> Iterator[tuple[FunctionType, FunctionType]]:
    """Pairs of a module's own functions and methods, as they are and as they would be."""
    if getattr(theirs, "__module__", None) != module.__name__:
        return
    if isinstance(theirs, FunctionType):
        yield inspect.unwrap(ours), inspect.unwrap(theirs)
    elif inspect.isclass(theirs):
        for name, method in vars(theirs).items():
            if isinstance(method, FunctionType) and isinstance(vars(ours).get(name), FunctionType):
                yield inspect.unwrap(vars(ours)[name]), inspect.unwrap(method)


@contextmanager
def files_below(n_bytes: int) -> Iterator[None]:
    """Until the context ends, no file grows beyond a size: write(2) refuses with EFBIG, as with ENOSPC on a full disk.

    For this process, and those that it starts.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


_SITECUSTOMIZE = """
import importlib.util, sys
{patch}
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "{module}":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), patch(module))
        return spec

sys.meta_path.insert(0, Finder)
"""


def patched_when_imported(folder: Path, module: str, patch: str) -> None:
    """Let processes with `folder` on their PYTHONPATH call a function on a module of ours as soon as it is imported.

    `patch` is the source of that function, which has this name. Python runs a `sitecustomize` at its start.
    """
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(module=module, patch=patch), encoding="utf-8")
