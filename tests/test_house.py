"""The house: rooms import in one direction only, the wheel holds what it should, no file names a machine."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    "echo_hooks": ROOT / "echo_hooks",
    "echo_launch": ROOT / "launchers" / "echo_launch",
    "echo_megatron": ROOT / "integrations" / "megatron" / "echo_megatron",
    "echo_deepspeed": ROOT / "integrations" / "deepspeed" / "echo_deepspeed",
}

# Rooms and single modules from left to right; those of one column do not import each other. "" stands for the public
# face, echo_hooks/__init__.py.
COLUMNS = (
    ("errors", "patching", "runner", "host_tensors", "layouts"),
    ("late", "stand_ins"),
    ("integrations",),
    ("hardware",),
    ("graph",),
    ("world", "devices"),
    ("capture",),
    ("timing", "network", "stages", "mode"),
    ("overlap", "session"),
    ("profiling",),
    ("compose", "device_memory"),
    ("report",),
    ("analysis",),
    ("simulation",),
    ("",),
    ("echo_launch",),
)
COLUMN = {room: i for i, rooms in enumerate(COLUMNS) for room in rooms}
TORCH_FREE = (
    "errors",
    "patching",
    "runner",
    "late",
    "layouts",
    "stand_ins",
    "integrations",
    "hardware",
    "graph",
    "timing",
    "network",
    "overlap",
    "compose",
    "report",
    "device_memory",
    "analysis",
)

MEASURES_WITH_TORCH = "echo_hooks.overlap.collection"  # of a room that is else free of torch


def modules() -> list[tuple[str, Path]]:
    """Every module of the distribution as (dotted name, file)."""
    found = []
    for package, directory in SOURCES.items():
        for path in sorted(directory.rglob("*.py")):
            parts = (package, *path.relative_to(directory).with_suffix("").parts)
            found.append((".".join(p for p in parts if p != "__init__"), path))
    return found


def imports(name: str, path: Path) -> list[str]:
    """Dotted names that a module imports, inside functions too; those under TYPE_CHECKING are no dependency."""
    found: list[str] = []
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.rsplit(".", node.level - 1)[0]
                base = f"{above}.{base}".rstrip(".")
            found.append(base)
            # `from echo_hooks import graph` imports a room, not a name of the public face.
            found.extend(f"{base}.{alias.name}" for alias in node.names if base in SOURCES)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def room(dotted: str) -> str | None:
    """The room of a dotted name; None for what is not ours."""
    package, _, rest = dotted.partition(".")
    if package != "echo_hooks":
        return package if package in SOURCES else None
    first = rest.partition(".")[0]
    return first if first in COLUMN else ""


def test_rooms_import_only_to_their_left():
    wrong = []
    for name, path in modules():
        here = room(name)
        for imported in imports(name, path):
            there = room(imported)
            if there is None or there == here or imported in SOURCES:
                continue
            if here in ("echo_megatron", "echo_deepspeed"):
                if there == "echo_launch":
                    wrong.append(f"{name} imports {imported}")
            elif there not in COLUMN or COLUMN[there] >= COLUMN[here]:
                wrong.append(f"{name} imports {imported}")
    assert wrong == []


def test_rooms_that_must_not_know_torch():
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules()
        if room(name) in TORCH_FREE and not name.startswith(MEASURES_WITH_TORCH)
        for imported in imports(name, path)
        if imported.partition(".")[0] == "torch"
    ]
    assert wrong == []


def test_torch_free_rooms_load_without_torch():
    names = [
        name for name, _ in modules() if room(name) in TORCH_FREE and not name.startswith(f"{MEASURES_WITH_TORCH}.")
    ]
    # The public face (echo_hooks/__init__.py) runs before any room and may load torch only when asked.
    program = f"import sys\nfor n in {names!r}: __import__(n)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_nothing_names_the_machine_it_was_written_on():
    # Spelled in two halves, so that this file does not find itself.
    forbidden = re.compile(
        "|".join(("/wo" + "rk/", "/tm" + "p/wt", "/ro" + "ot/", "/ho" + "me/", "session" + "[-_ ]id"))
    )
    found = []
    for path in tracked():
        text = path.read_bytes().decode(errors="replace")
        found += [f"{path.relative_to(ROOT)}: {hit.group()}" for hit in forbidden.finditer(text)]
    assert found == []


def test_packages_in_pyproject_are_those_on_disk():
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    on_disk = {name for name, path in modules() if path.name == "__init__.py"}
    assert on_disk <= set(configured)


def test_wheel_holds_the_packages_and_their_data(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        str(tmp_path),
    ]
    # setuptools writes build/ and *.egg-info beside the sources: build from a copy of the tracked files.
    source = tmp_path / "source"
    for path in tracked():
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    if done.returncode and re.search(r"No module named '?(pip|setuptools)|Cannot import 'setuptools", done.stderr):
        pytest.skip("this environment has no setuptools of 77 or later to build with")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    tops = {name.partition("/")[0] for name in held}
    assert tops <= {"echo.py", *SOURCES}  # no `tests`, `launchers`, `examples`: a user's repository may have its own
    expected = {"echo.py"}
    names = {path.relative_to(ROOT) for path in tracked()}
    for package, directory in SOURCES.items():
        for path in directory.rglob("*"):
            if path.relative_to(ROOT) in names and path.suffix in (".py", ".toml", ".html", ".ubj"):
                expected.add(f"{package}/{path.relative_to(directory).as_posix()}")
    assert expected <= held, sorted(expected - held)


def test_entry_points_lead_somewhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for group, entries in {"console_scripts": project["scripts"], **project["entry-points"]}.items():
        for name, value in entries.items():
            assert importlib.metadata.EntryPoint(name, value, group).load() is not None
