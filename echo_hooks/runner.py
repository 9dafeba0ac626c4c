"""Runs a script exactly as `python script.py args` or `python -m module args` would: programs notice the difference."""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
import types
from collections.abc import Sequence


def run_script(path: str, args: Sequence[str], module: bool = False) -> None:
    """Run ``path`` (a file, or with ``module`` a module's name) as ``__main__`` with ``sys.argv[1:] == args``.

    As Python does, ``sys.argv[0]`` is the path as given (the module's file for a module), ``__file__`` is absolute and
    ``sys.path[0]`` is the script's directory (the current one for a module). Nothing is put back afterwards: the
    process belongs to the script. Whatever the script raises, SystemExit too, passes through.
    """
    set_import_path(path, module)
    sys.argv = [path, *args]
    if module:
        runpy.run_module(path, run_name="__main__", alter_sys=True)
        return
    # Not abspath: Python does not resolve ".." in it, which would lead elsewhere behind a symbolic link.
    absolute = os.path.join(os.getcwd(), path.removeprefix("./"))
    with open(absolute, "rb") as file:
        source = file.read()
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=absolute,
        __cached__=None,
        __builtins__=sys.modules["builtins"],
        __loader__=importlib.machinery.SourceFileLoader("__main__", absolute),
    )
    # In sys.modules before the code runs: pickle and multiprocessing look the script's classes up there.
    sys.modules["__main__"] = main
    exec(compile(source, absolute, "exec", dont_inherit=True), main.__dict__)


def set_import_path(path: str, module: bool = False) -> None:
    """Put first on ``sys.path`` what Python would put there for this script, unless PYTHONSAFEPATH forbids it."""
    if os.environ.get("PYTHONSAFEPATH"):
        return
    first = os.getcwd() if module else os.path.dirname(os.path.realpath(path))
    if not sys.path or sys.path[0] != first:
        sys.path.insert(0, first)
