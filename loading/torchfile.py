"""The tensors in a file that torch.save wrote, for step 2 of loading (see loading/checkpoint.py): a zip archive
of a pickle, data.pkl, and of the values of each storage, which are not compressed.

A pickle is a program. torch.load runs it with weights_only, which calls nothing but what makes
tensors, and onto the device "meta", which reads no values: all that it makes are shapes, and where
each storage begins in the file. Before, the directory of the archive is checked. A pickle may still
take time and memory; safetensors cannot."""

import math
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loading.files import FILE_BYTES, open_regular, stamp_of
from loading.reading import FileTensor


def torch_tensors(file: Path) -> list[FileTensor]:
    """The tensors of a file that torch.save wrote. A tensor without dimensions counts as one with a
    single element. Raises OSError, ValueError."""
    with open_regular(file) as f:
        stat = os.fstat(f.fileno())
    try:
        check_directory(file, stat.st_size)
        with warnings.catch_warnings(action="ignore"):
            named = torch.load(file, map_location="meta", weights_only=True)
        check_tensors(named)
        found = [file_tensor(file, stat, name, tensor) for name, tensor in named.items()]
        # Tied matrices share their bytes, but a small file must not become a large model
        if sum(math.prod(t.shape) * t.dtype.itemsize for t in found) > 2 * stat.st_size:
            raise ValueError("its tensors overlap")
    except Exception as error:  # whatever zipfile and torch raise for a damaged file
        # What torch says is of many lines, and how to read the file unsafely
        reason = f" ({error})" if type(error) is ValueError else ""
        raise ValueError(
            f"{file} is damaged, or cannot be read safely{reason}: take the model's safetensors, or"
            " save nothing but tensors by name, with torch 1.6 or later"
        ) from None
    return found


def check_directory(file: Path, size: int) -> None:
    """Raise ValueError if reading the entries of an archive could take more memory than its size
    justifies."""
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError("it is compressed")
            if entry.file_size > size:
                raise ValueError("it has an entry that is larger than itself")
            # torch does not distinguish capitals
            is_pickle = entry.filename.lower().endswith("data.pkl")
            if is_pickle and entry.file_size > FILE_BYTES:
                raise ValueError(f"it has a pickle of more than {FILE_BYTES:,} bytes")


def check_tensors(named: Any) -> None:
    """Raise ValueError if what a pickle makes is not dense tensors by name, whose values are those
    in the file."""

    def is_dense(value: Any) -> bool:
        dense = isinstance(value, Tensor) and value.layout is torch.strided
        return dense and not (value.is_quantized or value.is_neg() or value.is_conj())

    is_named = lambda name, value: isinstance(name, str) and is_dense(value)
    if not isinstance(named, dict) or not all(is_named(*item) for item in named.items()):
        raise ValueError("it holds something other than named, dense tensors")


def file_tensor(file: Path, stat: os.stat_result, name: str, tensor: Tensor) -> FileTensor:
    start = tensor.untyped_storage()._checkpoint_offset
    if start is None:  # it was made of no storage
        raise ValueError(f"{name} has no values")
    strides = None if tensor.is_contiguous() else tensor.stride()
    found = FileTensor(
        file,
        name,
        tensor.dtype,
        tuple(tensor.shape) or (1,),
        start + tensor.storage_offset() * tensor.itemsize,
        stamp_of(stat),
        strides,
    )
    if found.end > stat.st_size:
        raise ValueError(f"{name} lies outside it")
    return found
