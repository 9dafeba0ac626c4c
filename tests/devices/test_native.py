"""The native part: slots read from headers, exact removal, refusal instead of an abort."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from echo_hooks.devices import native, selftest
from echo_hooks.devices.machine_code import MachineCode
from echo_hooks.errors import UsageError

HEADER = """
struct TORCH_API Base {
  // virtual int in_a_comment();
  virtual ~Base() = default;
  virtual bool first() const { return false; }  /* virtual int also_not(); */
  virtual void second(int x) const {
    TORCH_CHECK(false, "virtual int in_a_string() { ");
  }
  int not_virtual();
#ifdef USE_ROCM
  virtual const std::vector<std::string>& rocm_only() const { return empty; }
#endif
  virtual const Generator& third(
      [[maybe_unused]] int index = -1) const = 0;
};
struct TORCH_API Derived : Base {
  ~Derived() override = default;
  bool first() const override { return true; }
  virtual void second(int x) const override;
  virtual long fourth() const noexcept { return 0; }
};
struct After { virtual int outside(); };
"""


def test_slots_in_order():
    base = native.virtual_slots(HEADER, "Base")
    assert base == ["~", "~", "first", "second", "third"]
    assert native.virtual_slots(HEADER, "Derived", base) == [*base, "fourth"]


def test_missing_struct():
    with pytest.raises(ValueError, match="no struct Other"):
        native.virtual_slots(HEADER, "Other")


def test_installed_headers_agree_with_the_library():
    slots = native._hook_slots()
    assert slots[:2] == ["~", "~"] and slots[2] == "isBuilt"
    table = native._address_of(native._torch_cpu(), "_ZTVN2at18CUDAHooksInterfaceE")
    assert native._symbol_bytes(table) == 8 * (len(slots) + 2)


def test_mismatch_is_refused_in_one_sentence():
    with pytest.raises(UsageError, match=r"headers declare 1 CUDA hooks and its library has 2; use an official wheel"):
        native.check_slot_count(["isBuilt"], 4 * 8)
    with pytest.raises(UsageError, match="cannot be read"):
        native.check_slot_count(["isBuilt"], None)


def test_no_executable_memory_is_refused(monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("echo_hooks.devices.machine_code.mmap.mmap", refuse)
    with pytest.raises(UsageError, match=r"executable memory .*not permitted.*; use an x86-64 or AArch64"):
        native._machine_code()


def test_machine_code_returns_constants_and_cells():
    code, cell = MachineCode(), ctypes.c_uint64(5)
    function = ctypes.CFUNCTYPE(ctypes.c_uint64)
    assert function(code.constant(0x1234_5678_9ABC_DEF0))() == 0x1234_5678_9ABC_DEF0
    load = function(code.load(cell))
    assert load() == 5
    cell.value = 7
    assert load() == 7
    assert code.constant(1) == code.constant(1)
    bits_of_one = 0x3FF0_0000_0000_0000
    assert ctypes.CFUNCTYPE(ctypes.c_double)(code.constant(bits_of_one))() == 1.0


def test_arm_encoding():
    """Words of the Arm manual: ldr x0, pc+16 = 58000080; ldr x0, [x0] = f9400000; fmov d0, x0 = 9e670000;
    mov x1, #0 = d2800001; ret = d65f03c0."""
    code = MachineCode()
    code._processor = "aarch64"
    assert code._load_code(0xAABB).hex() == "80000058" + "000040f9" + "010080d2" + "c0035fd6" + "bbaa000000000000"
    assert code._constant_code(7).hex() == "80000058" + "0000679e" + "010080d2" + "c0035fd6" + "0700000000000000"


def test_failing_self_test_is_one_sentence(monkeypatch):
    def fail():
        raise RuntimeError("no gradient")

    monkeypatch.setattr(selftest, "trial", fail)
    with pytest.raises(UsageError, match=r"fails its self-test on torch .*: RuntimeError: no gradient"):
        selftest.check()


def test_abort_in_the_self_test_is_survived(monkeypatch):
    def abort():
        faulthandler.disable()  # pytest's: it would print where the process was
        os.abort()

    monkeypatch.setattr(selftest, "trial", abort)
    with pytest.raises(UsageError, match="signal 6"):
        selftest.check()


def run(script: str) -> str:
    """Output of a script in a process of its own, where torch has never been touched."""
    path = os.pathsep.join([str(Path(native.__file__).parents[2]), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SETUP = """
import torch
from fakes import H100, Pretend
from echo_hooks.devices.allocator import CachingAllocator
from echo_hooks.devices.pretended_cuda import PretendedCuda
from echo_hooks.graph.recorder import Recorder
device = PretendedCuda(Recorder(0, 8), H100, device_count=8, local_rank=0, allocator=CachingAllocator(2**30))
"""


def test_removal_restores_the_very_objects():
    changed = run(
        SETUP
        + """
import torch.cuda.nccl, torch.cuda.nvtx, torch._dynamo  # importing dynamo wraps some functions of torch
modules = [torch, torch._C, torch.cuda, torch.accelerator, torch.version, torch.backends.cuda, torch.cuda.memory,
           torch.cuda.random, torch.cuda.streams, torch.cuda.graphs, torch.cuda.nvtx, torch.cuda.nccl]
before = [dict(vars(m)) for m in modules]
multithreading = torch._C._is_multithreading_enabled()
for _ in range(2):
    device.install()
    assert torch.cuda.device_count() == 8
    with Pretend():
        model = torch.nn.Linear(4, 4, device="cuda")
        model(torch.randn(2, 4, device="cuda")).sum().backward()
    del model
    device.remove()
device.remove()
for module, old in zip(modules, before):
    new = vars(module)
    print(*[f"{module.__name__}.{k}" for k in old if k not in new or new[k] is not old[k]])
    print(*[f"{module.__name__}.{k}" for k in new if k not in old and not k.startswith("_dynamo")])
assert torch._C._is_multithreading_enabled() == multithreading
assert not torch.cuda.is_available()
torch.nn.Linear(2, 2)(torch.randn(2, 2)).sum().backward()
"""
    )
    assert changed.split() == []


def test_probes_answer_as_before_after_removal():
    answers = run(
        SETUP
        + """
def probes():
    for probe in (lambda: torch.cuda.is_available(), lambda: torch.empty(2, device="cuda"),
                  lambda: torch.empty(2).cuda(), lambda: torch.cuda.Stream(), lambda: torch.Generator("cuda"),
                  lambda: torch.accelerator.current_accelerator(), lambda: torch.empty(2, device=0)):
        try:
            yield repr(probe())
        except Exception as error:
            yield f"{type(error).__name__}: {error}"
before = list(probes())
device.install()
device.remove()
after = list(probes())
print(*[f"{a} | {b}" for a, b in zip(before, after) if a != b], sep="\\n")
"""
    )
    assert answers.strip() == ""


def test_objects_kept_past_the_end_say_so():
    out = run(
        SETUP
        + """
device.install()
kept = torch.cuda.Stream
device.remove()
try:
    kept()
except RuntimeError as error:
    print(error)
"""
    )
    assert "a simulation that is over" in out


def test_exit_with_the_device_in_place():
    assert run(SETUP + "device.install(); print('end')") == "end\n"


def test_forked_children_serve_their_own_ranks():
    out = run(
        SETUP
        + """
import os
device.install()
for rank in range(2):
    if os.fork() == 0:
        recorder = Recorder(rank, 8)
        device.retarget(recorder, rank, CachingAllocator(2**30))
        torch.cuda.set_device(rank)
        with Pretend():
            model = torch.nn.Linear(4, 4, device="cuda")
            model(torch.randn(2, 4, device="cuda")).sum().backward()
        torch.cuda.synchronize()
        print(rank, model.weight.grad.device, len(recorder.program), flush=True)
        os._exit(0)
    os.wait()
"""
    )
    assert out.splitlines() == ["0 cuda:0 1", "1 cuda:1 1"]
