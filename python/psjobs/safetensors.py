"""Reads and writes models as files: https://huggingface.co/docs/safetensors, without its types of 8-bit floats."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from psjobs._native import InputError
from psjobs.buffers import octets


TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}


def write(file: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors to a file, which is there whole or not at all.

    Raises InputError for a tensor whose type the format does not have, OSError if the file cannot be written.
    """
    header: dict[str, Any] = {}
    values, end = [], 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise InputError(f"{name} is {tensor.dtype}, which a safetensors file does not hold; convert it first")
        flat = tensor.detach().cpu().contiguous().view(-1)
        values.append(flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8))
        begin, end = end, end + flat.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = pathlib.Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for tensor in values:
                out.write(octets(tensor))
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def read(file: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors of a file by their names, on the CPU. Raises InputError as `parse`."""
    return parse(pathlib.Path(file).read_bytes(), os.fspath(file))


def parse(contents: bytes, file: str) -> dict[str, torch.Tensor]:
    """The tensors in the contents of `file` by their names, on the CPU.

    Raises InputError if it is no safetensors file, is cut short, or has tensors of a type that TYPES lacks.
    """
    data = bytearray(contents)
    begin = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8:begin])
        tensors = {name: about for name, about in header.items() if name != "__metadata__"}
        return {name: _tensor(data, begin, about) for name, about in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(f"{file} is no whole safetensors file of the types that torch has: {error}") from None


def _tensor(data: bytearray, begin: int, about: dict[str, Any]) -> torch.Tensor:
    dtype, shape, (start, end) = about["dtype"], about["shape"], about["data_offsets"]
    if dtype not in TYPES:
        raise ValueError(f"a tensor is {dtype}")
    if begin + end > len(data):
        raise ValueError(f"it has {len(data)} bytes instead of {begin + end}")
    flat = torch.frombuffer(data, dtype=torch.uint8, count=end - start, offset=begin + start) if end > start else None
    # Offsets in the file need not be multiples of what an element takes.
    flat = torch.empty(0, dtype=TYPES[dtype]) if flat is None else flat.clone().view(TYPES[dtype])
    return flat.view(shape)
