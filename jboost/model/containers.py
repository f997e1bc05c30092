# SPDX-License-Identifier: Apache-2.0
"""The file format: named arrays and a JSON header in one file, written atomically.

In: a type's name, plain fields, NumPy arrays. Out: bytes; or the same from bytes::

    offset  bytes
    0       8       magic: 89 4A 42 4F 4F 53 54 0A  (byte 89, "JBOOST", newline)
    8       4       version of this layout, an unsigned integer: 1
    12      4       CRC-32 of the header
    16      8       length of the header in bytes, an unsigned integer
    24              header: a JSON object in ASCII, padded with spaces to an offset
                    that is a multiple of 64, where the data begins
                    data: the arrays in order, each padded with zero bytes to a
                    multiple of 64, including the last one; nothing after it

Integers and arrays are little-endian, arrays in C order, booleans bytes of 0 or 1.
The header has four entries::

    {"type": "Bins", "written_by": "jboost 0.5.0", "fields": {"absent": "missing"},
     "arrays": {"thresholds": {"dtype": "float32", "shape": [2, 3], "offset": 0,
                               "bytes": 24, "crc32": 2226272953}}}

where offsets count from the beginning of the data, and ``crc32`` is the checksum of
the array's bytes. (The CRC-32 is that of zlib, PNG and ``zlib.crc32``.)
"""

import json
import os
import secrets
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

FILE_VERSION = 1
MAGIC = b"\x89JBOOST\n"
ALIGNMENT = 64
DTYPES = (
    "bool", "uint8", "uint16", "uint32", "int32", "int64", "float32", "float64",
)  # fmt: skip
_BEGIN = len(MAGIC) + 16

# First bytes of files of other formats, their names, and how to read them.
_FOREIGN = (
    (b"\x80", "a pickle", "which could run any code and is never opened"),
    (b"\x93NUMPY", "a NumPy array", "for numpy.load"),
    (b"PK\x03\x04", "a ZIP archive (as numpy.savez makes)", "for numpy.load"),
    (b"\x1f\x8b", "a gzip file", "decompress it first"),
    (
        b"{L\x00\x00\x00\x00\x00\x00\x00",
        "XGBoost's UBJSON",
        "for jb.interchange.read_xgboost",
    ),
    (b"binf", "XGBoost's old binary format", "save it as JSON in XGBoost first"),
    (b"tree\n", "a LightGBM model", "for jb.interchange.read_lightgbm"),
    (b"jboost-block", "a block of a stream", "which jb.stream alone reads"),
    (b"version https://git-lfs", "a pointer of Git LFS", "fetch it: git lfs pull"),
    (b"<", "a web page or XML", "perhaps from a failed download"),
)  # fmt: skip


class FileError(ValueError):
    """A file is damaged, of another format, or of an unsupported version.

    Raised by :func:`jboost.load`, :func:`jboost.interchange.read_xgboost` and
    :func:`jboost.interchange.read_lightgbm`.

    Example:
      >>> import io, jboost as jb
      >>> try:
      ...     jb.load(io.BytesIO(b"no model"))
      ... except jb.FileError as error:
      ...     print(str(error).partition(":")[0])
      'the file' is not a file of jboost
    """


class Container(NamedTuple):
    """The contents of a file."""

    type: str
    fields: dict[str, Any]
    arrays: dict[str, np.ndarray]
    written_by: str = ""


def library_version() -> str:
    """Returns this library's name and version, as stored in files."""
    try:
        return f"jboost {version('jboost')}"
    except PackageNotFoundError:  # run from source, without installation
        return "jboost (not installed)"


def write_container(container: Container, target: Any) -> None:
    """Writes a file completely, or fails and leaves an existing file unchanged.

    Args:
      target: a path, or a binary file that is open for writing.
    """
    if hasattr(target, "write"):
        for piece in _encode(container):
            target.write(piece)
        return
    path = Path(os.path.realpath(target))  # replaces the target of a link
    if path.exists() and not path.is_file():  # a pipe, a device
        with open(path, "wb") as file:
            file.writelines(_encode(container))
        return
    replace_file(path, _encode(container))


def read_container(source: Any) -> Container:
    """Reads a file; the arrays are read-only.

    Args:
      source: a path, or a binary file that is open for reading.
    """
    if hasattr(source, "read"):
        return _read(source, repr(getattr(source, "name", "the file")))
    with open(source, "rb") as file:
        return _read(file, repr(os.fspath(source)))


def _encode(container) -> Iterator[bytes | memoryview]:
    entries, offset = {}, 0
    pieces = {}
    for name, array in container.arrays.items():
        kind = array.dtype.name
        assert kind in DTYPES, kind
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        content = little.reshape(-1).view(np.uint8).data
        entries[name] = {
            "dtype": kind, "shape": list(array.shape), "offset": offset,
            "bytes": len(content), "crc32": zlib.crc32(content),
        }  # fmt: skip
        pieces[name] = content
        offset += _aligned(len(content))
    header = {
        "type": container.type,
        "written_by": library_version(),
        "fields": container.fields,
        "arrays": entries,
    }
    text = json.dumps(header, allow_nan=False).encode("ascii")
    text = text.ljust(_aligned(_BEGIN + len(text)) - _BEGIN)
    yield MAGIC
    yield np.array([FILE_VERSION, zlib.crc32(text)], "<u4").tobytes()
    yield np.array(len(text), "<u8").tobytes()
    yield text
    for content in pieces.values():
        yield content
        yield bytes(_aligned(len(content)) - len(content))


def _aligned(size):
    return -(-size // ALIGNMENT) * ALIGNMENT


def replace_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Writes a temporary file next to the path, then renames it; atomic."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as file:
            if path.exists():  # its mode stays
                os.chmod(part, stat.S_IMODE(path.stat().st_mode))
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:  # also ctrl-C, once the file may be there
        with suppress(OSError):
            os.unlink(part)
        folder = path.parent
        if isinstance(error, FileNotFoundError) and not folder.is_dir():
            text = "there is no such folder"
            raise FileNotFoundError(error.errno, text, os.fspath(folder)) from None
        raise
    if os.name == "posix":  # the name is on disk once its folder is
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _read(file: BinaryIO, name: str) -> Container:
    begin = _read_begin(file, name)
    checksum = int.from_bytes(begin[12:16], "little")
    length = int.from_bytes(begin[16:24], "little")
    rest = memoryview(file.read())  # not the length in the header
    if length > len(rest):
        raise _damaged(
            name, f"its header ends after {len(rest)} bytes, expected {length}"
        )
    header = _parse(bytes(rest[:length]), checksum, name)
    data, arrays, end = rest[length:], {}, 0
    for key, entry in header["arrays"].items():
        arrays[key] = _read_array(data, entry, f"array {key!r}", end, name)
        end += _aligned(entry["bytes"])
    if len(data) != end:
        raise _damaged(name, f"it has {len(data)} bytes of data, expected {end}")
    return Container(header["type"], header["fields"], arrays, header["written_by"])


def _read_begin(file, name):
    begin = file.read(_BEGIN)
    if not isinstance(begin, bytes):
        raise TypeError("a file must be open in binary mode ('rb'), got text")
    if not begin.startswith(MAGIC):
        raise _foreign(begin + file.read(200), name)
    if len(begin) < _BEGIN:
        raise _damaged(name, f"it has only {len(begin)} bytes, expected {_BEGIN}")
    layout = int.from_bytes(begin[8:12], "little")
    if layout != FILE_VERSION:
        raise FileError(
            f"{name} has version {layout} of the file format, and {library_version()} "
            f"reads version {FILE_VERSION}; a later jboost may have written it, or it "
            "is damaged"
        )
    return begin


def _foreign(begin, name):
    """Returns the error for a file of another format, with its name if recognized."""
    expected = f"{name} is not a file of jboost"
    if not begin:
        return FileError(f"{expected}: it is empty")
    if begin.startswith(b"{") and b'"learner"' in begin:
        return FileError(
            f"{expected}: this looks like XGBoost's JSON, for "
            "jb.interchange.read_xgboost"
        )
    for start, kind, remedy in _FOREIGN:
        if begin.startswith(start):
            return FileError(f"{expected}: this looks like {kind}, {remedy}")
    return FileError(f"{expected}: it must begin with {MAGIC!r}, got {begin[:8]!r}")


def _parse(text, checksum, name):
    def refuse(constant):  # NaN and infinity are not JSON
        raise ValueError(constant)

    found = zlib.crc32(text)
    if found != checksum:
        raise _damaged(
            name, f"the checksum of its header is {found}, expected {checksum}"
        )
    try:
        header = json.loads(text, parse_constant=refuse)
        kinds = {"type": str, "written_by": str, "fields": dict, "arrays": dict}
        right = isinstance(header, dict) and header.keys() == kinds.keys()
        right = right and all(isinstance(header[k], kinds[k]) for k in kinds)
    except (ValueError, RecursionError):
        right, header = False, {}
    if not right:
        raise _damaged(name, "its header is not a JSON object with the four entries")
    return header


def _read_array(data, entry, what, offset, name):
    """Returns an array as a view on ``data``; checks everything in its entry."""
    kinds = {"dtype": str, "shape": list, "offset": int, "bytes": int, "crc32": int}
    if not isinstance(entry, dict) or entry.keys() != kinds.keys():
        raise _damaged(name, f"{what} must have the entries {tuple(kinds)}")
    dtype, shape, size = entry["dtype"], entry["shape"], entry["bytes"]
    if dtype not in DTYPES:
        raise _damaged(name, f"{what} must have one of the types {DTYPES}, got {dtype}")
    if not isinstance(shape, list) or not all(
        type(length) is int and length >= 0 for length in shape
    ):
        raise _damaged(name, f"{what} must have a shape of lengths, got {shape}")
    count = np.dtype(dtype).itemsize
    for length in shape:  # Python integers do not overflow
        count *= length
    if type(size) is not int or size != count or len(shape) > 32:
        raise _damaged(name, f"{what} of shape {shape} has {size} bytes, not {count}")
    if count == 0 and sum(shape) > 2**31:
        raise _damaged(name, f"{what} of shape {shape} holds nothing")
    if entry["offset"] != offset:
        raise _damaged(name, f"{what} must begin at {offset}, got {entry['offset']}")
    end = offset + _aligned(size)
    if end > len(data):
        raise _damaged(name, f"{what} ends at {end} of {len(data)} bytes of data")
    content = data[offset : offset + size]
    found, expected = zlib.crc32(content), entry["crc32"]
    if found != expected:
        raise _damaged(name, f"the checksum of {what} is {found}, expected {expected}")
    if any(data[offset + size : end]):
        raise _damaged(name, f"the bytes after {what} are not zero")
    raw = np.frombuffer(content, np.uint8)
    if dtype == "bool" and raw.size and raw.max() > 1:
        raise _damaged(name, f"{what} holds bytes that are neither 0 nor 1")
    array = raw.view(np.dtype(dtype).newbyteorder("<")).reshape(shape)
    # On a little-endian processor a view, which is float32 by name, too, not <f4.
    return array.view(dtype) if array.dtype.isnative else array.astype(dtype)


def _damaged(name, how):
    return FileError(f"{name} is damaged: {how}")
