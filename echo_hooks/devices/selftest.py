"""A trial run of the pretended device in a forked child: where it does not hold, C++ aborts the process."""

from __future__ import annotations

import os
import select
import signal
import time
import traceback

import torch
from torch._subclasses import fake_tensor

from echo_hooks.errors import UsageError

_LIMIT_S = 60.0


def check() -> None:
    """Run `trial` in a fork. Raises UsageError with what happened when the child fails, aborts or hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run(writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said, status = _outcome(child, pipe)
    if status != 0:
        died = f"signal {-status}" if status < 0 else (said.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"the pretended GPU fails its self-test on torch {torch.__version__}: {died}")


def trial() -> None:
    """What would fail first: backward, layer norm, a fused optimizer, an integer device, streams, generators."""
    # The device says that it is there, and must not be initialised by FakeTensor.
    fake_tensor.init_gpu_context = lambda *_: None  # type: ignore[assignment]
    fake_tensor.FakeTensorMode.avoid_device_init = True  # type: ignore
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        weight = torch.nn.Parameter(torch.empty(8, 8, device="cuda"))
        inputs = torch.empty(4, 8, device=0)
        torch.nn.functional.layer_norm(inputs @ weight, (8,)).sum().backward()
        if weight.grad is None or weight.grad.device != torch.device("cuda", 0):
            raise RuntimeError("backward made no gradient on cuda:0")
        torch.optim.AdamW([weight], fused=True).step()
        query = torch.empty(1, 2, 16, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    torch.Generator(device="cuda").set_state(torch.cuda.get_rng_state())


def _run(writer: int) -> None:
    """The child: never returns."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # an abort prints to stderr
        trial()
        status = 0
    except BaseException as error:
        # A process whose autograd has started device threads cannot run backward in a fork, whatever the device.
        if "Autograd-and-Fork" in str(error):
            os._exit(0)
        os.write(writer, traceback.format_exc().encode()[-4096:])
    finally:
        os._exit(status)


def _outcome(child: int, pipe) -> tuple[str, int]:
    """(what the child said, its exit status or minus the signal that ended it)."""
    deadline = time.monotonic() + _LIMIT_S
    said = b""
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(pipe.fileno(), 4096)
        if not piece:  # the child is gone
            return said.decode(errors="replace"), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said += piece
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"no end after {_LIMIT_S:.0f} s", 1
