"""The native part of the pretended device: c10's device guard and ATen's CUDA hooks answer for a GPU that is not there.

Two tables of C++ virtual functions speak for a device type. PyTorch keeps one guard per device type in a registry,
and one hooks object for CUDA. Both are exchanged here after ``import torch``, without a compiler: the object gets
another table, a copy whose slots lead to a few bytes of machine code (`MachineCode`). Which slot is which is read
from the C++ headers that ship in the wheel, so a torch with new virtual functions is either understood or refused.

Without the guard, autograd on a tensor that says "cuda" does not raise: it aborts the process. Hence the self-test in
a forked child (`selftest`), which a caller runs after `NativeDevice.install`.
"""

from __future__ import annotations

import ctypes
import os
import re

import torch

from echo_hooks.devices.libraries import cudnn_version
from echo_hooks.devices.machine_code import MachineCode
from echo_hooks.errors import UsageError

# c10/core/DeviceType.h; the numbers are part of the serialisation format and do not change.
_CUDA = 1
_META = 14

_DESTRUCTOR = "~"
_WORD = ctypes.sizeof(ctypes.c_void_p)


class NativeDevice:
    """Makes C++ code believe in ``device_count`` CUDA devices; ``select`` names the current one.

    ``install`` raises UsageError with the reason where this torch cannot be dealt with; nothing is changed then.
    ``remove`` puts back what was found.
    """

    def __init__(self, device_count: int):
        self.device_count = device_count
        self._device = ctypes.c_uint64()  # a c10::Device: type in the low byte, index in the next
        self._index = ctypes.c_uint64()
        self._restore: list[tuple[int, int | None]] = []  # (address of a pointer, its former value)
        self._kept: list = []
        self._multithreading = True
        self.select(0)

    def select(self, index: int) -> None:
        """Make ``index`` the current CUDA device of C++ code."""
        self._device.value = _CUDA | index << 8
        self._index.value = index

    def install(self) -> None:
        """Exchange guard and hooks, and let backward run in the calling thread (one order, Python's thread-locals)."""
        code, guard_slots, hook_slots = _machine_code(), _guard_slots(), _hook_slots()
        registry, hooks = _guard_registry(), _cuda_hooks()
        guard, table = self._guard(code, guard_slots, registry), self._hooks_table(code, hook_slots, hooks)
        _start_autograd()
        self._swap(registry + _CUDA * _WORD, guard)
        self._swap(hooks, table)
        self._multithreading = torch._C._is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False)

    def remove(self) -> None:
        """Put back what was found. Tables and code stay in memory: C++ may still hold pointers to them."""
        if self._restore:
            torch._C._set_multithreading_enabled(self._multithreading)
        while self._restore:
            address, value = self._restore.pop()
            ctypes.c_void_p.from_address(address).value = value

    def _swap(self, address: int, value: int) -> None:
        pointer = ctypes.c_void_p.from_address(address)
        self._restore.append((address, pointer.value))
        pointer.value = value

    def _guard(self, code: MachineCode, slots: list[str], registry: int) -> int:
        """A guard object of our own: the Meta device's, which is always registered, with every slot replaced."""
        answers = dict.fromkeys(slots, code.constant(0))
        answers |= dict.fromkeys(("type", "queryEvent", "queryStream"), code.constant(1))  # type: CUDA; no work is left
        answers["deviceCount"] = code.constant(self.device_count)
        answers |= dict.fromkeys(_RETURN_DEVICE_OR_STREAM, code.load(self._device))
        answers["getDeviceCapability"] = code.constant(-1)  # a bit per dtype
        meta = ctypes.c_void_p.from_address(registry + _META * _WORD).value
        if meta is None:
            raise UsageError(_refusal("its registry of device guards has no entry for the meta device"))
        table = _copy_of_table(meta, slots, {name: address for name, address in answers.items() if name != _DESTRUCTOR})
        guard = (ctypes.c_void_p * 4)(_functions(table))  # a guard has no data members: the table is all of it
        self._kept += [table, guard]
        return ctypes.addressof(guard)

    def _hooks_table(self, code: MachineCode, slots: list[str], hooks: int) -> int:
        current, count, yes = code.load(self._index), code.constant(self.device_count), code.constant(1)
        answers = dict.fromkeys(("isBuilt", "isAvailable", "hasPrimaryContext", "hasCUDA", "isPinnedPtr"), yes)
        answers |= dict.fromkeys(("deviceCount", "getNumGPUs"), count)
        answers |= dict.fromkeys(
            ("getCurrentDevice", "current_device", "exchangeDevice", "maybeExchangeDevice"), current
        )
        answers |= dict.fromkeys(("init", "setCurrentDevice", "deviceSynchronize"), code.constant(0))
        answers["getPinnedMemoryAllocator"] = code.constant(_cpu_allocator())
        # Which convolutions (and whether they keep channels last) and batch norms are chosen depends on these.
        answers["compiledWithCuDNN"] = yes
        answers["batchnormMinEpsilonCuDNN"] = code.constant(0)  # CUDNN_BN_MIN_EPSILON of <cudnn.h>, 0.0 since 7.5
        for name in slots:
            if name.startswith("supports") and name.endswith(("WithCuDNN", "WithCuDNNv8")):
                answers[name] = yes
        if not torch.backends.cuda.is_built():
            answers |= dict.fromkeys(("hasCuDNN", "hasCUDART"), yes)
            answers |= dict.fromkeys(("versionCuDNN", "versionRuntimeCuDNN"), code.constant(cudnn_version()))
        table = _copy_of_table(hooks, slots, {name: address for name, address in answers.items() if name in slots})
        self._kept.append(table)
        return _functions(table)


# A stream is a device and an id; id 0 is the default stream. Which streams work runs on is Python's business here.
_RETURN_DEVICE_OR_STREAM = (
    "getDevice",
    "exchangeDevice",
    "getStream",
    "getDefaultStream",
    "getStreamFromGlobalPool",
    "getNewStream",
    "exchangeStream",
)

# Without these the device is not believed; later versions of torch may drop any of the others.
_NEEDED_GUARD_SLOTS = {"type", "exchangeDevice", "getDevice", "getStream", "exchangeStream", "deviceCount"}
_NEEDED_HOOK_SLOTS = {"hasPrimaryContext", "hasCUDA", "deviceCount", "getCurrentDevice", "current_device", "getNumGPUs"}


def virtual_slots(header: str, struct_name: str, inherited: list[str] | None = None) -> list[str]:
    """Names of a C++ struct's virtual functions in the order of its table (Itanium ABI), from the text of its header.

    ``inherited``: the slots of its base, which come first. A destructor takes two slots, both called "~". Comments,
    strings and blocks for ROCm builds are skipped. Raises ValueError when the struct is not in the header.
    """
    text = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', " ", header, flags=re.DOTALL)
    text = re.sub(r"#ifdef USE_ROCM\b.*?#endif", " ", text, flags=re.DOTALL)
    start = re.search(rf"\bstruct\s+(?:\w+\s+)?{struct_name}\b[^;{{]*\{{", text)
    if start is None:
        raise ValueError(f"no struct {struct_name} in the header")
    body = text[start.end() : _closing(text, start.end())]
    slots = list(inherited or [])
    for declaration in re.finditer(r"\bvirtual\b[^;{]*?(~?)(\w+)\s*\(", body):
        if declaration.group(1):
            slots += [_DESTRUCTOR] * (0 if inherited else 2)
        elif inherited is None or declaration.group(2) not in inherited:
            slots.append(declaration.group(2))
    return slots


def _closing(text: str, start: int) -> int:
    """Index of the brace that closes the one before ``start``."""
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return start + brace.start()
    raise ValueError("braces do not match")


def _guard_slots() -> list[str]:
    try:
        slots = virtual_slots(_header("c10/core/impl/DeviceGuardImplInterface.h"), "DeviceGuardImplInterface")
    except ValueError as error:
        raise UsageError(_refusal(f"DeviceGuardImplInterface.h: {error}")) from None
    _check_needed(slots, _NEEDED_GUARD_SLOTS, "DeviceGuardImplInterface.h")
    return slots


def _hook_slots() -> list[str]:
    try:
        base = virtual_slots(_header("ATen/detail/AcceleratorHooksInterface.h"), "AcceleratorHooksInterface")
        slots = virtual_slots(_header("ATen/detail/CUDAHooksInterface.h"), "CUDAHooksInterface", base)
    except ValueError as error:
        raise UsageError(_refusal(f"CUDAHooksInterface.h: {error}")) from None
    _check_needed(slots, _NEEDED_HOOK_SLOTS, "CUDAHooksInterface.h")
    table = _address_of(_torch_cpu(), "_ZTVN2at18CUDAHooksInterfaceE")
    check_slot_count(slots, _symbol_bytes(table))
    return slots


def check_slot_count(slots: list[str], table_bytes: int | None) -> None:
    """Compare the slots read from the headers with the size of the library's own table (two more words in front).

    Raises UsageError on a mismatch: headers and library are not of the same build.
    """
    if table_bytes is None:
        raise UsageError(_refusal("the size of its table of CUDA hooks cannot be read"))
    if table_bytes != (len(slots) + 2) * _WORD:
        found = table_bytes // _WORD - 2
        raise UsageError(_refusal(f"its headers declare {len(slots)} CUDA hooks and its library has {found}"))


def _check_needed(slots: list[str], needed: set[str], header: str) -> None:
    missing = sorted(needed - set(slots))
    if missing:
        raise UsageError(_refusal(f"{header} no longer declares {', '.join(missing)}"))


def _refusal(reason: str, remedy: str = "use an official wheel of torch 2.9 to 2.14") -> str:
    return f"torch {torch.__version__} cannot be given a pretended GPU: {reason}; {remedy}"


def _header(path: str) -> str:
    full = os.path.join(os.path.dirname(torch.__file__), "include", path)
    try:
        with open(full, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise UsageError(_refusal(f"{full} cannot be read ({error.strerror})")) from None


def _machine_code() -> MachineCode:
    try:
        return MachineCode()
    except (OSError, NotImplementedError) as error:
        remedy = "use an x86-64 or AArch64 Linux host that allows it"
        raise UsageError(_refusal(f"it needs a page of executable memory ({error})", remedy)) from None


def _start_autograd() -> None:
    """Let autograd's engine start while there are no devices: it starts a thread for each, once, at the first backward.

    These threads would have nothing to do, and a process that has them must not fork any more.
    """
    with torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).backward()


# ---- tables ----


def _copy_of_table(instance: int, slots: list[str], answers: dict[str, int]) -> ctypes.Array:
    """A copy of an object's table (with offset-to-top and type information before it), some slots replaced."""
    functions = ctypes.c_void_p.from_address(instance).value or 0
    original = (ctypes.c_void_p * (len(slots) + 2)).from_address(functions - 2 * _WORD)
    table = (ctypes.c_void_p * (len(slots) + 2))(*original)
    for number, name in enumerate(slots):
        if name in answers:
            table[number + 2] = answers[name]
    return table


def _functions(table: ctypes.Array) -> int:
    return ctypes.addressof(table) + 2 * _WORD


# ---- symbols of the libraries ----


def _library(name: str) -> ctypes.CDLL:
    path = os.path.join(os.path.dirname(torch.__file__), "lib", name)
    try:
        return ctypes.CDLL(path)
    except OSError:
        raise UsageError(_refusal(f"{path} cannot be loaded", "use an official Linux wheel of torch")) from None


def _torch_cpu() -> ctypes.CDLL:
    return _library("libtorch_cpu.so")


def _address_of(library: ctypes.CDLL, symbol: str) -> int:
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(library, symbol))
    except ValueError:
        raise UsageError(_refusal(f"its library does not export {symbol}")) from None


def _call(library: ctypes.CDLL, symbol: str) -> int:
    """Result of an exported function without arguments that returns a pointer."""
    return ctypes.CFUNCTYPE(ctypes.c_void_p)(_address_of(library, symbol))()


def _guard_registry() -> int:
    return _address_of(_library("libc10.so"), "_ZN3c104impl26device_guard_impl_registryE")


def _cuda_hooks() -> int:
    return _call(_torch_cpu(), "_ZN2at6detail12getCUDAHooksEv")


def _cpu_allocator() -> int:
    return _call(_library("libc10.so"), "_ZN3c1015GetCPUAllocatorEv")


class _SymbolInfo(ctypes.Structure):  # Dl_info of <dlfcn.h>
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


class _ElfSymbol(ctypes.Structure):  # Elf64_Sym of <elf.h>
    _fields_ = [
        ("name", ctypes.c_uint32),
        ("info", ctypes.c_uint8),
        ("other", ctypes.c_uint8),
        ("section", ctypes.c_uint16),
        ("value", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    ]


def _symbol_bytes(address: int) -> int | None:
    """Size of the exported symbol at ``address`` (glibc's dladdr1); None where it is not to be had."""
    process = ctypes.CDLL(None)
    if not hasattr(process, "dladdr1"):
        return None
    info, symbol = _SymbolInfo(), ctypes.c_void_p()
    symbol_entry = 1  # RTLD_DL_SYMENT
    if not process.dladdr1(ctypes.c_void_p(address), ctypes.byref(info), ctypes.byref(symbol), symbol_entry):
        return None
    return _ElfSymbol.from_address(symbol.value).size if symbol.value else None
