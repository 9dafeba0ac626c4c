"""echo-sim profile: record, merge, show, check and learn from databases of measured operations."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from echo_hooks.errors import UsageError
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.program import Kind
from echo_hooks.graph.rundir import RankTrace, read_ops, read_run
from echo_hooks.hardware.accelerator import Accelerator, accelerator_names, load_accelerator
from echo_hooks.report.quantities import percent_text
from echo_hooks.report.text import heading, line, row, show, table
from echo_hooks.timing import estimate
from echo_hooks.timing.classes import op_class
from echo_hooks.timing.database import CONDITIONS, Database, key_of, merge, read_database, write_database
from echo_hooks.timing.learned import save_model
from echo_hooks.timing.training import HeldOut, hold_out, trained, usable


def add_commands(commands: Any) -> None:
    """`echo-sim profile ACTION`."""
    profile = commands.add_parser("profile", help="databases of measured operations: record, merge, show, check, train")
    actions = profile.add_subparsers(title="actions", metavar="ACTION", required=True)

    recorder = _action(actions, "record", record, "measure operations on this machine's GPU into a database")
    recorder.add_argument(
        "sources",
        nargs="*",
        type=Path,
        metavar="RUN|OPS",
        help="run directories of echo-launch --simulate, or single ranks/NNNNN.ops.parquet files",
    )
    recorder.add_argument("--grid", choices=("training",), help="also the built-in grid of what training uses")
    recorder.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="FILE.parquet; one that exists is added to"
    )
    recorder.add_argument("--budget-s", type=float, default=float("inf"), metavar="SECONDS", help="stop in time")
    recorder.add_argument(
        "--conditions", default="cold,warm,loaded", metavar="LIST", help="only these (default: %(default)s)"
    )
    recorder.add_argument("--device", default="cuda:0", help="default: %(default)s")
    recorder.add_argument("--seed", type=int, default=0, help="of the random operands (default: 0)")

    merger = _action(actions, "merge", merge_files, "several databases into one")
    merger.add_argument("files", nargs="+", type=Path, metavar="FILE")
    merger.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")

    shower = _action(actions, "show", show_file, "what a database holds, by class and by device")
    shower.add_argument("file", type=Path, metavar="FILE")
    shower.add_argument("--op", metavar="NAME", help="the measurements of one operation, such as mm")
    shower.add_argument("--json", action="store_true", help="print JSON instead of text")

    checker = _action(actions, "check", check_file, "whether a database is sound, and how well a model learns from it")
    checker.add_argument("file", type=Path, metavar="FILE")
    checker.add_argument("--json", action="store_true", help="print JSON instead of text")

    trainer = _action(actions, "train", train_file, "learn a model from a database, with its error on withheld shapes")
    trainer.add_argument("file", type=Path, metavar="FILE")
    trainer.add_argument("-o", "--output", type=Path, required=True, metavar="NAME", help="NAME.ubj and NAME.json")
    trainer.add_argument("--seed", type=int, default=0, help="of the trees and the withheld shapes (default: 0)")


def _action(actions: Any, name: str, function: Any, text: str) -> argparse.ArgumentParser:
    command = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.set_defaults(command=function)
    return command


# ---- record ----


def record(arguments: argparse.Namespace) -> int:
    """`echo-sim profile record`."""
    import torch  # late: the other actions do without

    from echo_hooks.capture.host_speed import host_speed
    from echo_hooks.profiling.rebuild import operand_bytes, rebuild
    from echo_hooks.profiling.record import Fatal, Machine, Recorder, most_valuable_first
    from echo_hooks.profiling.timer import KinetoTimer, TimingFailed

    if not arguments.sources and arguments.grid is None:
        raise UsageError("nothing to measure: name run directories, or --grid training")
    conditions = arguments.conditions.split(",")
    if not set(conditions) <= set(CONDITIONS):
        raise UsageError(f"--conditions {arguments.conditions}: known are {', '.join(CONDITIONS)}")
    if arguments.budget_s <= 0:
        raise UsageError(f"--budget-s {arguments.budget_s:g}: a number above 0 is needed")
    database = read_database(arguments.output) if arguments.output.exists() else Database()
    sources = [_source(path) for path in arguments.sources]
    if not torch.cuda.is_available():
        raise UsageError("no CUDA device is usable here: operations are measured on a machine with the GPU itself")
    try:
        device = torch.device(arguments.device)
        torch.cuda.set_device(device)
        product = torch.cuda.get_device_name(device)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UsageError(f"--device {arguments.device}: {str(error).splitlines()[0]}") from None
    if arguments.grid is not None:
        sources.append(_grid())
    accelerator = _accelerator_of(product)
    machine = Machine(product, torch.__version__, str(torch.version.cuda), str(torch.backends.cudnn.version()))
    recording = {
        "device": product,
        "torch": machine.torch,
        "cuda": machine.cuda,
        "cudnn": machine.cudnn,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "host_speed": host_speed(device),
    }
    if recording not in database.recordings:
        database.recordings.append(recording)

    def cost_us(signature: OpSignature) -> float:
        return estimate(signature, accelerator).duration_us

    wanted = most_valuable_first(sources, cost_us)
    generator = torch.Generator(device).manual_seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    try:
        recorder = Recorder(
            machine,
            KinetoTimer(device),
            lambda signature: rebuild(signature, device, generator),
            operand_bytes,
            cost_us,
            arguments.output,
            database,
            arguments.budget_s,
            say=lambda sentence: print(sentence, file=sys.stderr, flush=True),
            conditions=conditions,
        )
        done = recorder.record(wanted)
    except Fatal as error:
        raise UsageError(f"{error}; what was measured before is in {arguments.output}, start again to go on") from None
    except TimingFailed as error:
        raise UsageError(f"{product} cannot be measured: {error}") from None
    left = done.wanted - done.measured - done.skipped
    print(
        f"{arguments.output}: {done.measured} operations measured in {done.seconds:.0f} s on {product}, "
        f"{done.skipped} known before, {left} not measured"
    )
    for (name, why), count in Counter((name, why) for name, why, _ in database.unmeasured).most_common(30):
        print(f"  not measured: {name} ({count}): {why}")
    return 0


def _source(path: Path) -> tuple[list[OpSignature], list[float]]:
    """(signatures, how often a step makes each) of a run directory or a single table of operations."""
    if path.is_dir():
        run = read_run(path)
        pairs = [_used(trace) for trace in run.traces.values()]
        return [s for ops, _ in pairs for s in ops], [n for _, counts in pairs for n in counts]
    ops = _local(read_ops(path))
    return ops, [1.0] * len(ops)


def _used(trace: RankTrace) -> tuple[list[OpSignature], list[float]]:
    program = trace.program
    local = program.op[(program.kind == Kind.COMPUTE) | (program.kind == Kind.COPY)]
    counts = np.bincount(local[local >= 0], minlength=len(trace.ops))
    used = [i for i in np.flatnonzero(counts)]
    return [trace.ops[i] for i in used], [float(counts[i]) for i in used]


def _local(ops: Sequence[OpSignature]) -> list[OpSignature]:
    """Those that run on the device: no communication, no marks."""
    return [o for o in ops if o.name.startswith(("aten.", "fsdp.", "copy_", "prims."))]


def _grid() -> tuple[list[OpSignature], list[float]]:
    """The grid's operations: its script is simulated in a process of its own, which sees no GPU."""
    import echo_hooks.profiling as room

    script = Path(room.__file__).with_name("grid.py")
    with tempfile.TemporaryDirectory(prefix="echo-grid-") as directory:
        out = Path(directory) / "run"
        command = [sys.executable, "-m", "echo_launch", "--simulate", "--world-size", "1", "--warmup-steps", "0"]
        command += ["--cluster", "h100-sxm:1x1", "--timing", "model", "--json", "--quiet"]
        command += ["--out", str(out), str(script)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        )
        if done.returncode not in (0, 3):
            raise UsageError(f"the grid could not be simulated: {done.stderr.strip().splitlines()[-1:]}")
        return _source(out / "ranks" / "00000.ops.parquet")


def _accelerator_of(product: str) -> Accelerator:
    """The preset of that name; for another device the newest one stands in: it only decides the order."""
    for name in accelerator_names():
        found = load_accelerator(name)
        if found.product == product:
            return found
    return load_accelerator("h200-sxm")


def _cpu_name() -> str:
    try:
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# ---- merge and show ----


def merge_files(arguments: argparse.Namespace) -> int:
    """`echo-sim profile merge`."""
    merged = merge(read_database(path) for path in arguments.files)
    write_database(arguments.output, merged)
    print(f"{arguments.output}: {len(merged.rows)} measurements of {len(arguments.files)} databases")
    return 0


def show_file(arguments: argparse.Namespace) -> int:
    """`echo-sim profile show`."""
    database = read_database(arguments.file)
    if arguments.json:
        print(json.dumps(_summary(database), indent=1, allow_nan=False))
        return 0
    console = Console()
    if arguments.op is not None:
        return _show_op(database, arguments.op, console)
    for recording in database.recordings:
        line(console, ", ".join(f"{k} {v}" for k, v in recording.items() if not isinstance(v, dict)))
        speeds = recording.get("host_speed")
        if isinstance(speeds, dict):
            line(console, "host: " + ", ".join(f"{k} {v}" for k, v in speeds.items()))
    cells = table("class", "operations", "measurements", "median spread", left=1)
    for name, found in _by_class(database).items():
        spread = float(np.median([(r.p90_us - r.p10_us) / max(r.median_us, 1e-9) for r in found]))
        row(cells, name, str(len({key_of(r.signature) for r in found})), str(len(found)), percent_text(spread))
    show(console, cells)
    for (name, why), count in Counter((n, w) for n, w, _ in database.unmeasured).most_common():
        line(console, f"not measured: {name} ({count}): {why}")
    return 0


def _show_op(database: Database, name: str, console: Console) -> int:
    found = [r for r in database.rows if r.signature.name.split(".")[1:2] == [name] or r.signature.name == name]
    if not found:
        raise UsageError(f"--op {name}: the database has no such operation")
    heading(console, f"{name}: {len(found)} measurements")
    cells = table("operands", "condition", "median us", "P10", "P90", "samples", "kernels", left=1)
    for r in found:
        operands = " ".join(f"{t.dtype}[{','.join(map(str, t.shape))}]" for t in r.signature.inputs[:3])
        numbers = (f"{r.median_us:.1f}", f"{r.p10_us:.1f}", f"{r.p90_us:.1f}", str(r.samples), str(r.kernels))
        row(cells, operands, r.condition, *numbers)
    show(console, cells)
    return 0


def _by_class(database: Database) -> dict[str, list]:
    classes: dict[str, list] = {}
    for measurement in database.rows:
        found = op_class(measurement.signature.name)
        classes.setdefault(found.name if found is not None else "unknown", []).append(measurement)
    return dict(sorted(classes.items()))


# ---- check and train ----

NOISY_SPREAD = 0.2
"""P10 to P90 over the median from which a measurement is called noisy."""


def check_file(arguments: argparse.Namespace) -> int:
    """`echo-sim profile check`."""
    database = read_database(arguments.file)
    noisy = [r for r in database.rows if r.p90_us - r.p10_us > NOISY_SPREAD * r.median_us]
    errors = {a.name: hold_out(usable(database, a), a) for a in _accelerators(database) if usable(database, a)}
    if arguments.json:
        found = {name: [asdict(e) for e in held] for name, held in errors.items()}
        print(json.dumps({**_summary(database), "noisy": len(noisy), "hold_out": found}, indent=1, allow_nan=False))
        return 0
    console = Console()
    line(console, f"{arguments.file}: {len(database.rows)} measurements, all of them sound")
    line(console, f"{len(noisy)} with a spread (P10 to P90) of more than {NOISY_SPREAD:.0%} of their median")
    for name, held in errors.items():
        heading(console, f"{name}: mean absolute error on withheld shapes (half of each class; three draws)")
        _print_errors(held, console)
    if not errors:
        line(console, "no device of a known accelerator: nothing can be learned from it")
    return 0


def train_file(arguments: argparse.Namespace) -> int:
    """`echo-sim profile train`."""
    database = read_database(arguments.file)
    accelerators = _accelerators(database)
    if len(accelerators) != 1:
        names = ", ".join(a.name for a in accelerators) or "none"
        raise UsageError(f"{arguments.file}: measurements of one known accelerator are needed, it has {names}")
    model = trained(database, accelerators[0], arguments.seed)
    save_model(model, arguments.output)
    _print_errors([HeldOut(**e) for e in model.about["hold_out"]], Console())
    print(f"{arguments.output}.ubj and .json: learned for {', '.join(sorted(model.classes))}")
    return 0


def _print_errors(held: Sequence[HeldOut], console: Console) -> None:
    cells = table("class", "ops", "shapes", "roofline", "learned", "used", left=1)
    for e in held:
        used = "learned" if e.better else "roofline"
        row(cells, e.name, str(e.operations), str(e.shapes), percent_text(e.roofline), percent_text(e.learned), used)
    show(console, cells)


def _accelerators(database: Database) -> list[Accelerator]:
    products = {r.device for r in database.rows}
    return [a for a in map(load_accelerator, accelerator_names()) if a.product in products]


def _summary(database: Database) -> dict[str, Any]:
    return {
        "recordings": database.recordings,
        "measurements": len(database.rows),
        "classes": {
            name: {"operations": len({key_of(r.signature) for r in found}), "measurements": len(found)}
            for name, found in _by_class(database).items()
        },
        "unmeasured": [{"op": n, "why": w} for n, w, _ in database.unmeasured],
    }
