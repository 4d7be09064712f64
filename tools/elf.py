"""Reads which shared libraries and symbols an ELF file asks the loader for, with nothing but the standard library."""

from __future__ import annotations

import re
import struct
from pathlib import Path

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB = 0, 1, 5
_SHT_DYNSYM, _SHT_VERNEED = 11, 0x6FFFFFFE

#: e_machine of the ELF header, as wheels name it.
_MACHINES = {62: "x86_64", 183: "aarch64"}


def needed(path: str | Path) -> list[str]:
    """The DT_NEEDED entries of a 64-bit little-endian ELF file, in their order."""
    data = _read(path)
    (offset,) = struct.unpack_from("<Q", data, 0x20)
    size, count = struct.unpack_from("<HH", data, 0x36)
    # Type, flags, offset in the file, address, physical address, bytes in the file.
    segments = [struct.unpack_from("<IIQQQQ", data, offset + index * size) for index in range(count)]

    def in_file(address: int) -> int:
        for kind, _, start, virtual, _, length in segments:
            if kind == _PT_LOAD and virtual <= address < virtual + length:
                return int(start + address - virtual)
        raise ValueError(f"{path}: no segment holds the address {address:#x}")

    dynamic = [segment for segment in segments if segment[0] == _PT_DYNAMIC]
    if not dynamic:
        return []
    _, _, start, _, _, length = dynamic[0]
    entries: list[tuple[int, int]] = []
    for tag, value in struct.iter_unpack("<qQ", data[start : start + length]):
        if tag == _DT_NULL:
            break
        entries.append((tag, value))
    names = in_file(next(value for tag, value in entries if tag == _DT_STRTAB))

    return [_text(data, names + value) for tag, value in entries if tag == _DT_NEEDED]


def undefined(path: str | Path) -> list[str]:
    """The dynamic symbols that a 64-bit little-endian ELF file expects others to define, without their versions."""
    data = _read(path)
    sections = _sections(data)
    found = []
    for _, kind, _, _, start, length, link in sections:
        if kind == _SHT_DYNSYM:
            names = sections[link][4]
            # Name, kind and binding, visibility, section (0: undefined), value, size.
            for name, _, _, section, _, _ in struct.iter_unpack("<IBBHQQ", data[start : start + length]):
                if name and section == 0:
                    found.append(_text(data, names + name))
    return found


def versions(path: str | Path) -> list[str]:
    """The versions of symbols that a 64-bit little-endian ELF file needs, such as GLIBC_2.17; sorted."""
    data = _read(path)
    sections = _sections(data)
    found = set()
    for _, kind, _, _, start, _, link in sections:
        if kind != _SHT_VERNEED:
            continue
        names, at, more = sections[link][4], start, True
        while more:
            # Version of this record, number of its versions, library, offset of the first, offset of the next record.
            _, count, _, first, following = struct.unpack_from("<HHIII", data, at)
            entry = at + first
            for _ in range(count):
                # Hash, flags, number, name, offset of the next.
                _, _, _, name, next_entry = struct.unpack_from("<IHHII", data, entry)
                found.add(_text(data, names + name))
                entry += next_entry
            at, more = at + following, following != 0
    return sorted(found)


def machine(path: str | Path) -> str:
    """The processor that an ELF file is for: x86_64, aarch64, or the number in its header."""
    (number,) = struct.unpack_from("<H", _read(path), 0x12)
    return _MACHINES.get(number, str(number))


def _sections(data: bytes) -> list[tuple[int, ...]]:
    """Of each section: name, type, flags, address, offset in the file, bytes, number of the section with its names."""
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    return [struct.unpack_from("<IIQQQQI", data, offset + index * size) for index in range(count)]


def _read(path: str | Path) -> bytes:
    data = Path(path).read_bytes()
    if data[:4] != b"\x7fELF":
        raise ValueError(f"{path} is not an ELF file")
    if data[4:6] != b"\x02\x01":
        raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
    return data


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


#: What every Linux with glibc has: its own libraries, the loader, and the compiler's run-time library. With musl there
#: is one library for all of it, named libc.so or by its processor.
SYSTEM_LIBRARIES = frozenset(
    {"libc", "libm", "libdl", "libpthread", "librt", "libutil", "libgcc_s", "ld-linux-x86-64", "ld-linux-aarch64"}
    | {"libc.musl-x86_64", "libc.musl-aarch64"}
)


def foreign(libraries: list[str]) -> list[str]:
    """Those that a bare system need not have, such as libtorch, libpython or libcudart."""
    return [name for name in libraries if name.split(".so")[0] not in SYSTEM_LIBRARIES]


def of_cuda(symbols: list[str]) -> list[str]:
    """Those that a library of CUDA defines: the driver, its runtime, NVRTC or NCCL."""
    return [name for name in symbols if re.match(r"(cu|cuda|nvrtc|nccl|pnccl)[A-Z]", name)]
