"""Reads the models that servers export: https://huggingface.co/docs/safetensors, its f32 part."""

from __future__ import annotations

import json
import pathlib

import torch

from psjobs._native import InputError


def read(file: pathlib.Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by their names, on the CPU.

    Raises InputError if the file is no safetensors file, or has tensors of another type than F32.
    """
    data = bytearray(file.read_bytes())
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
    except ValueError:
        raise InputError(f"{file} is not a safetensors file") from None
    tensors = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        start, end = about["data_offsets"]
        if about["dtype"] != "F32" or begin + end > len(data):
            raise InputError(f"{file}: tensor {name} is {about['dtype']}, or cut short; servers export whole F32 tensors")
        count = (end - start) // 4
        flat = torch.frombuffer(data, dtype=torch.float32, count=count, offset=begin + start) if count else torch.empty(0)
        tensors[name] = flat.view(about["shape"])
    return tensors
