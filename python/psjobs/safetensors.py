"""Reads the models that servers export: https://huggingface.co/docs/safetensors, its f32 part."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch

from psjobs._native import InputError


def read(file: pathlib.Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by their names, on the CPU. Raises InputError as `parse`."""
    return parse(file.read_bytes(), str(file))


def parse(contents: bytes, file: str) -> dict[str, torch.Tensor]:
    """The tensors in the contents of `file` by their names, on the CPU.

    Raises InputError if it is no safetensors file, is cut short, or has tensors of another type than F32.
    """
    data = bytearray(contents)
    begin = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8:begin])
        tensors = {name: about for name, about in header.items() if name != "__metadata__"}
        return {name: _tensor(data, begin, about) for name, about in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(f"{file} is no whole safetensors file of F32 tensors, as servers export them: {error}") from None


def _tensor(data: bytearray, begin: int, about: dict[str, Any]) -> torch.Tensor:
    dtype, shape, (start, end) = about["dtype"], about["shape"], about["data_offsets"]
    if dtype != "F32":
        raise ValueError(f"a tensor is {dtype}")
    if begin + end > len(data):
        raise ValueError(f"it has {len(data)} bytes instead of {begin + end}")
    count = (end - start) // 4
    flat = torch.frombuffer(data, dtype=torch.float32, count=count, offset=begin + start) if count else torch.empty(0)
    return flat.view(shape)
