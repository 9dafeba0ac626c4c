"""The few machine instructions that answer a C++ virtual call: return a constant, or what a memory cell holds.

A ctypes callback could do the same for most calls, but it takes the interpreter lock, dies with the interpreter, and
cannot return a struct in two registers (``c10::Stream`` is one). These few bytes have none of that.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct


class MachineCode:
    """One executable page of functions; alive, with all their addresses, for the rest of the process.

    Both kinds return a 64-bit word in the first result register and 0 in the second, so that a caller may take the
    result as bool, integer, pointer, ``c10::Device`` or ``c10::Stream`` (device, id 0), as its declaration says; a
    constant's bits are in the first floating-point register too, so 0 is also 0.0.

    Raises OSError where no executable memory is to be had, NotImplementedError on other processors than x86-64 and
    AArch64.
    """

    def __init__(self) -> None:
        self._processor = platform.machine().lower()
        if self._processor not in ("x86_64", "amd64", "aarch64", "arm64"):
            raise NotImplementedError(f"machine code for processor {platform.machine()}")
        self._page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        self._known: dict[bytes, int] = {}
        _KEPT.append(self)

    def constant(self, value: int) -> int:
        """Address of a function that returns ``value``."""
        return self._function(self._constant_code(value & 0xFFFF_FFFF_FFFF_FFFF))

    def load(self, cell: ctypes.c_uint64) -> int:
        """Address of a function that returns what ``cell`` holds when it is called; the caller keeps the cell alive."""
        return self._function(self._load_code(ctypes.addressof(cell)))

    def _constant_code(self, value: int) -> bytes:
        if self._processor in ("x86_64", "amd64"):
            # mov rax, value; movq xmm0, rax; xor edx, edx; ret
            return b"\x48\xb8" + struct.pack("<Q", value) + b"\x66\x48\x0f\x6e\xc0\x31\xd2\xc3"
        # ldr x0, value; fmov d0, x0; mov x1, #0; ret; value
        return struct.pack("<IIIIQ", 0x58000080, 0x9E670000, 0xD2800001, 0xD65F03C0, value)

    def _load_code(self, address: int) -> bytes:
        if self._processor in ("x86_64", "amd64"):
            return b"\x48\xa1" + struct.pack("<Q", address) + b"\x31\xd2\xc3"  # mov rax, [address]; xor edx, edx; ret
        # ldr x0, address; ldr x0, [x0]; mov x1, #0; ret; address
        return struct.pack("<IIIIQ", 0x58000080, 0xF9400000, 0xD2800001, 0xD65F03C0, address)

    def _function(self, code: bytes) -> int:
        known = self._known.get(code)
        if known is not None:
            return known
        start = (self._page.tell() + 15) // 16 * 16
        self._page.seek(start)
        self._page.write(code)  # ValueError when the page is full: some 150 functions, five times what is needed
        if self._processor in ("aarch64", "arm64"):  # instruction and data caches are not coherent there
            flush = ctypes.CDLL("libgcc_s.so.1").__clear_cache
            flush(ctypes.c_void_p(self._base + start), ctypes.c_void_p(self._base + start + len(code)))
        self._known[code] = self._base + start
        return self._base + start


_KEPT: list[MachineCode] = []  # C++ objects may hold pointers into the page until the process ends
