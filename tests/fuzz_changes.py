# SPDX-License-Identifier: Apache-2.0
"""Random changes of file contents: documents, texts, bytes, arrays, containers.

Checksums are computed anew, so that the changes reach the code behind them.
"""

import copy
import io
import json
import struct
import warnings
import zlib

import numpy as np

from jboost.model.containers import Container, read_container, write_container
from jboost.streams.blocks import MAGIC

HOSTILE = (
    -1, 0, 1, 2, 7, 31, 2**16, 2**24 - 1, 2**24, 10**9, 2**31 - 1, 2**31, 2**40,
    2**63 - 1, 2**63, 10**30, -(2**31), -(2**63), 0.5, 1e39, 1e308, float("nan"),
    float("inf"), True, None, "", "x", "\ud800", [], {}, [0], ["c"] * 200, {"a": 1},
    -0.0, 1e-310, 1e12, "1" * 5000, "inf", "float16", "|O", "object", [[]], [None],
    {"float": "nan"}, {"float": []}, [2**62, 2**62], 2**62,
)  # fmt: skip
NUMBERS = [value for value in HOSTILE if type(value) in (int, float)]
# What a JSON reader must survive in the place of a value.
TEXTS = (
    "[" * 100_000, '{"a":' * 5000, "9" * 5000, "1e999", "NaN", "-Infinity", "-0",
    '"\\ud800"', '"\\u0000"', "[1,]", "1e-400", "\x00", "\u00e4",
)  # fmt: skip


def pick(values, random):
    return values[random.integers(len(values))]


# Documents: nested lists and dicts.


def list_places(value, found=None):
    """(container, key) of all that a document holds."""
    found = [] if found is None else found
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        found.append((value, key))
        if isinstance(item, dict | list):
            list_places(item, found)
    return found


def change_document(document, random):
    """Changes one to three places; all names are as likely as each other."""
    document = copy.deepcopy(document)
    for _ in range(random.integers(1, 4)):
        places = list_places(document)
        names = sorted({str(key) for _, key in places if isinstance(key, str)})
        if not names:
            break
        name = pick(names, random)
        places = [place for place in places if str(place[1]) == name]
        holder, key = pick(places, random)
        if isinstance(holder[key], list) and holder[key] and random.random() < 0.7:
            holder, key = holder[key], int(random.integers(len(holder[key])))
        change_place(holder, key, random)
    return document


def change_place(holder, key, random):
    kind, old = random.integers(8), holder[key]
    hostile = copy.deepcopy(pick(HOSTILE, random))
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(old, list):
        holder[key] = old * 2
    elif kind == 2 and isinstance(old, list):
        holder[key] = old[: len(old) // 2]
    elif kind == 3 and isinstance(holder, list):
        holder[key] = pick(holder, random)
    elif kind == 4 and type(old) in (int, float):
        holder[key] = old + pick((-1, 1, 0.5, -old, old), random)
    elif kind == 5 and isinstance(old, list) and old:
        order = random.permutation(len(old))
        holder[key] = [old[i] for i in order]
    elif isinstance(old, str) and old[:1].isdecimal() and not isinstance(hostile, list):
        holder[key] = str(hostile)
    else:
        holder[key] = hostile


def change_json(text, random):
    """Puts text that is no value, or a deep or long one, in the place of a value."""
    starts = [i for i, mark in enumerate(text) if mark in ":[,"]
    if not starts:
        return text
    place = pick(starts, random) + 1
    end = place + int(random.integers(0, 4))
    return text[:place] + pick(TEXTS, random) + text[end:]


def json_safe(value):
    """What JSON has no word for, as the format writes it."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return {"float": repr(value)}
    return value


def as_ubjson(value):
    """Lists of numbers as arrays, as XGBoost writes them."""
    if isinstance(value, dict):
        return {key: as_ubjson(item) for key, item in value.items()}
    if isinstance(value, list):
        kinds = {type(item) for item in value}
        if kinds == {int} and all(-(2**63) <= item < 2**63 for item in value):
            return np.array(value, np.int64)
        if kinds and kinds <= {int, float}:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of numbers beyond float32
                return np.array(value, np.float32)
        return [as_ubjson(item) for item in value]
    if isinstance(value, float):
        return as_ubjson([value])
    if value is None or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        return {}
    return value if not isinstance(value, str) else value.replace("\ud800", "?")


# Lines of text, and bytes.


def change_text(text, random):
    """Of a line "key=1 2 3" one number, or the whole; or lines."""
    lines = text.splitlines()
    for _ in range(random.integers(1, 4)):
        end = lines.index("end of trees") if "end of trees" in lines else len(lines)
        names = sorted({line.partition("=")[0] for line in lines[:end]})
        if not names:
            break
        name = pick(names, random)
        places = [i for i, line in enumerate(lines) if line.partition("=")[0] == name]
        place = pick(places, random)
        if random.random() < 0.1:
            place = int(random.integers(len(lines)))
        key, sign, values = lines[place].partition("=")
        mark = ":" if key == "feature_infos" and random.random() < 0.5 else " "
        values = values.split(mark)
        kind, one = random.integers(7), int(random.integers(len(values)))
        if kind == 0:
            del lines[place]
            continue
        if kind == 1:
            lines.insert(place, pick(lines, random))
            continue
        if kind == 2:
            del values[one]
        elif kind == 3:
            values.append(values[one])
        elif kind == 4:
            values[one] = pick(values, random)
        else:
            values[one] = str(pick(HOSTILE, random))
        lines[place] = key + sign + mark.join(values)
    return "\n".join(lines) + "\n"


def change_bytes(content, random):
    content = bytearray(content)
    for _ in range(random.integers(1, 4)):
        place = int(random.integers(len(content)))
        size = int(random.integers(1, 9))
        piece = random.choice(list(b"{}[]#$iUIlLdDSCZTF\0\1\x7f\x80\xff"), size)
        kind = random.integers(4)
        if kind == 0:
            del content[place : place + size]
        elif kind == 1:
            content[place : place + size] = piece.astype(np.uint8).tobytes()
        elif kind == 2:
            content[place:place] = piece.astype(np.uint8).tobytes()
        else:
            content[place:] = content[place : place + 2**12]
    return bytes(content)


# Arrays.


def change_array(array, random):
    """Another shape or dtype, or other, swapped or hostile numbers."""
    array, kind = array.copy(), random.random()
    if kind < 0.15 and array.ndim:
        axis = int(random.integers(array.ndim))
        count = int(random.choice([0, 1, array.shape[axis] * 2, array.shape[axis] + 1]))
        return np.resize(array, (*array.shape[:axis], count, *array.shape[axis + 1 :]))
    if kind < 0.2:
        return array[None] if random.random() < 0.5 else array.reshape(-1)
    if kind < 0.25:
        with np.errstate(all="ignore"):
            return array.astype(pick(["int32", "float32", "float64", "bool"], random))
    if kind < 0.35 and array.ndim:
        return np.roll(array, 1, axis=int(random.integers(array.ndim)))
    flat = array.reshape(-1)
    for _ in range(random.integers(1, 4) if flat.size else 0):
        place, other = random.integers(flat.size, size=2)
        if random.random() < 0.3:
            flat[place] = flat[other]
            continue
        near = (*array.shape, array.size, *(size - 1 for size in array.shape), 3, 32)
        value = pick(NUMBERS if random.random() < 0.5 else near, random)
        if array.dtype.kind in "iu":
            limits = np.iinfo(array.dtype)
            value = int(np.clip(np.nan_to_num(float(value)), -(2.0**63), 2.0**62))
            value = min(max(value, int(limits.min)), int(limits.max))
        with np.errstate(over="ignore"):
            flat[place] = value
    return array


# Files with checksums.


def change_container(content, random):
    """The file with other fields, or numbers in arrays, under right checksums."""
    container = read_container(io.BytesIO(content))
    fields, arrays = container.fields, dict(container.arrays)
    if random.random() < 0.4:
        fields = change_document(fields, random)
    for _ in range(random.integers(0, 4)):
        name, kind = pick([*arrays], random), random.random()
        if kind < 0.05:
            arrays.pop(name)
        elif kind < 0.1:
            arrays[name] = arrays[pick([*arrays], random)]
        else:
            arrays[name] = change_array(arrays[name], random)
        if not arrays:
            break
    file = io.BytesIO()
    write_container(Container(container.type, json_safe(fields), arrays), file)
    return change_header(file.getvalue(), random)


def change_header(content, random):
    """Sometimes also what the header says of arrays, or its text."""
    kind = random.random()
    if kind < 0.7:
        return content
    length = int.from_bytes(content[16:24], "little")
    text = content[24 : 24 + length].decode()
    if kind < 0.75:
        text = change_json(text, random)
    else:
        text = json.dumps(json_safe(change_document(json.loads(text), random)))
    text = text.encode("utf-8", "surrogatepass")
    text += b" " * (-(24 + len(text)) % 64)
    checksum = zlib.crc32(text).to_bytes(4, "little")
    size = len(text).to_bytes(8, "little")
    return content[:12] + checksum + size + text + content[24 + length :]


def change_block(content, random):
    """A file of a block with another header, or other parts, under right checksums."""
    if random.random() < 0.1:
        return change_bytes(content, random)
    begin = len(MAGIC) + 8
    (length,) = struct.unpack("<I", content[len(MAGIC) : len(MAGIC) + 4])
    header = json.loads(content[begin : begin + length])
    data = bytearray(content[begin + length :])
    kind = random.random()
    if kind < 0.5:
        entries = [*header["columns"], *header["others"].values()]
        for _ in range(random.integers(1, 3)):
            entry = pick(entries, random)
            _change_part(data, entry, random)
    if kind > 0.4:
        header = change_document(header, random)
        _check_parts_anew(data, header)
    text = json.dumps(header)
    if kind > 0.9:
        text = change_json(text, random)
    text = text.encode("utf-8", "surrogatepass")
    text += b" " * (-(begin + len(text)) % 64)
    sizes = struct.pack("<II", len(text), zlib.crc32(text))
    return MAGIC + sizes + text + bytes(data)


def _change_part(data, entry, random):
    start, size = entry["offset"], entry["bytes"]
    part = np.frombuffer(bytes(data[start : start + size]), np.uint8).copy()
    kind = random.random()
    if kind < 0.3:
        part[:] = random.integers(0, 256, part.size)
    elif kind < 0.5:
        part[:] = 255
    elif part.size:
        places = random.integers(0, part.size, random.integers(1, 9))
        part[places] = random.choice([0, 1, 127, 128, 254, 255], places.size)
    data[start : start + size] = part.tobytes()
    entry["crc"] = zlib.crc32(part.tobytes())


def _check_parts_anew(data, header):
    """Gives the checksums of what the header now calls its parts."""
    columns, others = header.get("columns"), header.get("others")
    entries = [*columns] if isinstance(columns, list) else []
    entries += others.values() if isinstance(others, dict) else []
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        offset, size = entry.get("offset"), entry.get("bytes")
        if type(offset) is int and type(size) is int:
            begin, end = (min(max(n, 0), len(data)) for n in (offset, offset + size))
            entry["crc"] = zlib.crc32(bytes(data[begin:end]))
