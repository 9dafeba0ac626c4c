"""Threads that the script starts see the same device as its main thread: dispatch modes are per thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from echo_hooks.capture.steps import StepsDone
from echo_hooks.patching import Patch


def patches(mode: TorchDispatchMode) -> list[Patch]:
    """What makes ``mode`` active in every thread started from now on."""

    def make(start: Callable) -> Callable:
        def start_watched(thread: threading.Thread) -> None:
            run, of_starter = thread.run, torch._C._is_multithreading_enabled()

            def run_watched() -> None:
                torch._C._set_multithreading_enabled(of_starter)  # backward stays in the thread that asked for it
                _push_mode(mode)
                try:
                    run()
                except StepsDone:  # the loop that this thread ran is over
                    pass
                finally:
                    _pop_mode()

            thread.run = run_watched  # type: ignore[method-assign]
            start(thread)

        return start_watched

    return [Patch(threading.Thread, "start", make, "dispatch modes do not reach threads started inside them")]
