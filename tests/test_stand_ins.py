"""Stand-ins: served only where they are called for, and gone without a trace."""

from __future__ import annotations

import importlib
import sys

import pytest

from echo_hooks.stand_ins import StandIn, StandIns

ONE = StandIn(
    name="needs_a_gpu",
    modules={"needs_a_gpu": "textwrap", "needs_a_gpu.inner": "bisect"},
    distribution="needs-a-gpu",
    version="1.2",
    frameworks=("framework_of_that_name",),
    words=("needs_a_gpu", "gpu-impl"),
    probed_by=("looks_for_it",),
)


@pytest.fixture
def finder():
    stand_ins = StandIns([ONE])
    stand_ins.install()
    yield stand_ins
    if stand_ins in sys.meta_path:
        stand_ins.remove()


def test_a_script_that_only_looks_finds_nothing(finder):
    assert importlib.util.find_spec("needs_a_gpu") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("needs_a_gpu")
    assert finder.served == []


def test_served_where_the_framework_is_imported(finder, monkeypatch):
    monkeypatch.setitem(sys.modules, "framework_of_that_name", sys)
    module = importlib.import_module("needs_a_gpu")
    import bisect
    import textwrap

    assert module.dedent is textwrap.dedent and module.__version__ == "1.2"
    assert module.inner.bisect_left is bisect.bisect_left  # as a package that imports its own modules


def test_served_where_the_script_names_it_and_said_once_to_each_recorder(finder):
    finder.asked = frozenset({"needs_a_gpu"})
    said: list[str] = []
    finder.say(said.append)
    importlib.import_module("needs_a_gpu.inner")
    again: list[str] = []
    finder.say(again.append)
    assert said == again and len(said) == 1
    assert said[0].startswith("needs-a-gpu is not installed here: Echo stands in for version 1.2")


def test_a_library_that_looks_for_it_finds_nothing_and_that_is_said(finder, monkeypatch):
    monkeypatch.setitem(sys.modules, "looks_for_it", sys)
    said: list[str] = []
    finder.say(said.append)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("needs_a_gpu")
    again: list[str] = []
    finder.say(again.append)
    assert said == again and len(said) == 1
    assert said[0].startswith("needs-a-gpu is not installed here and the script does not name it")
    monkeypatch.setenv("ECHO_WITH", "needs-a-gpu")
    importlib.import_module("needs_a_gpu")


def test_the_text_and_the_arguments_of_the_script_ask_for_it(finder):
    finder.ask({"torch"}, "import torch  # --impl gpu-impl")
    assert finder.asked == {"torch", "needs_a_gpu"}
    finder.ask({"torch"}, "import torch")
    assert finder.asked == {"torch"}


def test_a_cluster_without_the_package(finder, monkeypatch):
    finder.asked = frozenset({"needs_a_gpu"})
    monkeypatch.setenv("ECHO_WITHOUT", "other,needs-a-gpu")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("needs_a_gpu")


def test_the_real_package_never_fills_in(finder):
    finder.asked = frozenset({"needs_a_gpu"})
    with pytest.raises(ModuleNotFoundError, match="Echo stands in for needs_a_gpu"):
        importlib.import_module("needs_a_gpu.other")


def test_removed_exactly(finder):
    finder.asked = frozenset({"needs_a_gpu"})
    before = set(sys.modules)
    importlib.import_module("needs_a_gpu.inner")
    finder.remove()
    assert not {name for name in sys.modules if name.startswith("needs_a_gpu")}
    assert set(sys.modules) - before <= {"textwrap", "bisect"}
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("needs_a_gpu")
