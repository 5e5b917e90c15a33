"""Tensors as buffers, by which the native module reads and writes them."""

from __future__ import annotations

import ctypes

import torch


def floats(tensor: torch.Tensor) -> memoryview[float]:
    """The numbers of a contiguous f32 tensor on the CPU, flat."""
    return _bytes(tensor, torch.float32).cast("f")


def integers(tensor: torch.Tensor) -> memoryview[int]:
    """The numbers of a contiguous int64 tensor on the CPU, flat."""
    return _bytes(tensor, torch.int64).cast("q")


def octets(tensor: torch.Tensor) -> memoryview[int]:
    """The bytes of a contiguous uint8 tensor on the CPU, flat."""
    return _bytes(tensor, torch.uint8)


def _bytes(tensor: torch.Tensor, dtype: torch.dtype) -> memoryview[int]:
    assert tensor.dtype == dtype and tensor.is_contiguous() and tensor.device.type == "cpu"
    buffer = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    # Keeps the numbers.
    buffer.owner = tensor  # type: ignore[attr-defined]
    return memoryview(buffer).cast("B")
