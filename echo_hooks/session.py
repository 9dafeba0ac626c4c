"""One simulated rank: install the hooks, let the script run, take them out, give its trace."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import random
import sys
import time
import tokenize
import traceback

import torch

from echo_hooks.capture.execute import ExecuteCapture
from echo_hooks.capture.steps import StepsDone
from echo_hooks.errors import EchoError, ExecuteFailed, NothingSimulated, ScriptError
from echo_hooks.graph.rundir import RankTrace
from echo_hooks.integrations import Integration
from echo_hooks.runner import run_script
from echo_hooks.stages import Job, LiveStage, Stage, stage_for
from echo_hooks.world import meshes


class Tracer:
    """Traces ranks of one job, each in a process of its own: ``prepare()`` once, then fork, then ``trace(rank)``."""

    def __init__(self, job: Job):
        self.job = job
        self.stage: Stage | LiveStage | None = None

    def prepare(self) -> None:
        """Install rank-neutral hooks and import what the script will import, so that the forks find it ready."""
        self.stage = stage_for(self.job)
        self.stage.install()
        if isinstance(self.stage, LiveStage):
            return  # a framework's import may touch the GPU, which a fork would not survive
        text = script_text(self.job)
        imported = script_imports(text)
        self.stage.stand_ins.ask(imported, " ".join([text, *self.job.args]))
        for integration in self.stage.integrations:
            if imported & set(integration.frameworks):
                for name in integration.preload:
                    with contextlib.suppress(ImportError):  # another version lacks it: the script decides
                        importlib.import_module(name)

    def trace(self, rank: int) -> RankTrace:
        """Run the script as ``rank`` and return its measured steps. Leaves the hooks in: the process ends with it.

        Raises ScriptError with the script's own traceback, NothingSimulated when it took no optimizer step.
        """
        assert self.stage is not None, "prepare() comes first"
        stage, job = self.stage, self.job
        began = time.perf_counter()
        os.environ.update(stage.variables(rank))
        _seed(job.seed)
        capture = stage.become(rank)
        capture.start()
        failure: ScriptError | None = None
        try:
            local_rank = [f"--local_rank={rank % job.nproc_per_node}"] if job.local_rank_argument else []
            run_script(job.script, [*local_rank, *job.args], job.module)
        except StepsDone:
            pass
        except SystemExit as error:
            if error.code not in (None, 0):
                raise ScriptError(f"rank {rank}: the script exited with status {error.code}", rank) from None
        except EchoError:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            if isinstance(error, torch.OutOfMemoryError) and isinstance(stage, LiveStage):
                raise ExecuteFailed(f"rank {rank} does not fit into this GPU's memory: {error}") from None
            shown = _explanation(stage.integrations, error) + script_traceback(error)
            failure = ScriptError(f"rank {rank}: {type(error).__name__}: {error}", rank, shown)
            failure.__cause__ = error
        finally:
            capture.stop()
            stage.world.payloads.save()
        seconds = time.perf_counter() - began
        if failure is None:
            return finished(stage, seconds)
        with contextlib.suppress(Exception):  # nothing may hide the script's own failure
            failure.trace = stage.capture.trace(seconds)
            stage.named(failure.trace.groups)
        raise failure


def finished(stage: Stage | LiveStage, seconds: float) -> RankTrace:
    """The trace of the stage's rank; NothingSimulated (with the trace) when it lacks measured steps."""
    trace = stage.capture.trace(seconds)
    stage.named(trace.groups)
    missing = stage.capture.missing_steps()
    if missing is not None and isinstance(stage.capture, ExecuteCapture) and stage.capture.boundaries:
        raise ExecuteFailed(missing)
    if missing is not None:
        raise NothingSimulated(missing, trace.rank, trace)
    return trace


def _explanation(loaded: list[Integration], error: BaseException) -> str:
    """The line that says why a layout is illegal, to stand before the script's own traceback; "" for other errors."""
    explainers = [meshes.explain, *(one.explain for one in loaded if one.explain is not None)]
    line = next((line for explain in explainers if (line := explain(error))), None)
    return f"layout: {line}\n" if line else ""


def script_text(job: Job) -> str:
    """The script's own text; empty when it cannot be read."""
    path: str | None = job.script
    if job.module:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(job.script)
            path = spec.origin if spec else None
    try:
        with tokenize.open(path or "") as file:
            return file.read()
    except (OSError, SyntaxError, ValueError):
        return ""


def script_imports(text: str) -> set[str]:
    """Top-level names that the text of a script imports; empty when it is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def script_traceback(error: BaseException) -> str:
    """The traceback as Python would print it for the script alone: without Echo's frames around and below it."""
    ours = (os.path.dirname(os.path.abspath(__file__)) + os.sep, "<frozen runpy>")
    summary = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    part: traceback.TracebackException | None = summary
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        kept = [frame for frame in part.stack if not frame.filename.startswith(ours)]
        part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or part.__context__
    return "".join(summary.format())


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
