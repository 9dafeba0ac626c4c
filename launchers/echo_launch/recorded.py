"""One rank of a real run, in the process that torchrun starts: put the record in place, then be the script.

``echo_launch.torchrun`` starts ``python -u -c BOOTSTRAP script arguments...``. Whatever goes wrong before the script
begins ends in ``python -u script arguments...`` without a record, never in a script that does not run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import zipfile
from collections.abc import Callable
from types import TracebackType

SETTINGS = "ECHO_RECORD"  # in the environment until the rank has read it

# torchrun names the first argument that is no option as the one that failed; this text begins with "-", so that is the
# script. Python puts "" on the path for -c, where it would put the script's directory: it goes before any import.
BOOTSTRAP = """-cimport sys
sys.flags.safe_path or sys.path.pop(0)
from echo_launch.recorded import prepare, without_own_frames
run = prepare()
try:
    run()
except BaseException as error:
    error.__traceback__ = without_own_frames(error.__traceback__)
    raise
"""


def prepare() -> Callable[[], None]:
    """What runs the script that ``sys.argv`` names; the record is in place when this returns."""
    words = sys.argv[1:]
    settings = {}
    try:
        settings = json.loads(os.environ.pop(SETTINGS))
        if not settings["module"] and not _is_source(words[0]):
            raise ValueError(f"{words[0]} is no file of Python source")
        from echo_hooks.runner import run_script
        from echo_launch.recording import Recording

        Recording(settings["directory"], words[0], words[1:], settings["profile"]).start()
    except Exception as error:
        say(f"nothing is recorded: {error}")
        _become_plain(words, bool(settings.get("module")))
    return lambda: run_script(words[0], words[1:], settings["module"])


def say(sentence: str) -> None:
    """A line on stderr, with the rank; nothing when there is no stderr."""
    with contextlib.suppress(Exception):
        print(f"echo-launch: rank {os.environ.get('RANK', '?')}: {sentence}", file=sys.stderr, flush=True)


def _is_source(path: str) -> bool:
    return os.path.isfile(path) and not path.endswith(".pyc") and not zipfile.is_zipfile(path)


def _become_plain(words: list[str], module: bool) -> None:
    os.execv(sys.executable, [sys.executable, "-u", *(["-m"] if module else []), *words])


def without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the script: what stands before it is Echo's way there."""
    here = os.path.dirname(os.path.abspath(__file__))
    own = (os.path.join(here, "recorded.py"), "echo_hooks" + os.sep + "runner.py")
    at = traceback
    while at is not None and (
        at.tb_frame.f_code.co_filename.endswith(own) or at.tb_frame.f_code.co_filename == "<string>"
    ):
        at = at.tb_next
    return at or traceback
