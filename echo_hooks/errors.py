"""The errors that Echo raises on purpose; each carries the exit status that the command line answers with."""

from __future__ import annotations


class EchoError(Exception):
    """Base of all errors that end in one clear sentence instead of a traceback."""

    exit_status = 2


class UsageError(EchoError):
    """A bad argument or a bad file: what is wrong, where, what would be right."""

    exit_status = 2


class ScriptError(EchoError):
    """The user's script failed as some virtual rank.

    Attributes:
        rank: the virtual rank that failed.
        traceback: the script's own traceback as text ("" when the failure is not an exception).
        trace: what it did before (a RankTrace without measured steps), None when not known: its communication may
            still show why.
    """

    exit_status = 1

    def __init__(self, message: str, rank: int, traceback: str = "", trace=None):
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.trace = trace


class NothingSimulated(ScriptError):
    """The script ended well but took no optimizer step, or too few of them."""

    def __init__(self, message: str, rank: int, trace=None):
        super().__init__(message, rank, trace=trace)


class PlanError(EchoError):
    """The plan does not work: hang, mismatch between ranks, out of memory.

    Attributes:
        problems: list of ``echo_hooks.graph.problems.Problem``.
    """

    exit_status = 3

    def __init__(self, message: str, problems: list | None = None):
        super().__init__(message)
        self.problems = problems or []


class ExecuteFailed(EchoError):
    """A rank could not be run and measured on this machine's GPU, which another mode of timing does not need."""

    exit_status = 2
