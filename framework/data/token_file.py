"""Token files larger than memory, as windows for training language models; public as `framework.TokenFile`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, final

import numpy
import numpy.typing
import torch
from torch import Tensor
from torch.utils.data import Dataset

from framework.errors import DataError

_CHECKED_WHOLE = 1 << 30
"""Bytes: a file of at most this size, a second's read, is checked as a whole; of a larger one, blocks all over it."""
_BLOCK_SIZE = 1 << 20
"""Bytes of a block to check."""


@final
class TokenFile(Dataset[tuple[Tensor, ...]]):
    """The windows of a file of tokens: sample i is the tokens from `i * stride` on, and those that follow each.

    Windows are read from the file when they are asked for, and nothing is kept, so the file may be larger than memory.
    They are read by `pread`, not through a memory map: mapped pages count as memory of the process, and a file that is
    cut off while it is mapped kills the process by SIGBUS.

        TokenFile("train.bin", block_size=1024, vocab_size=50257)

    Args:
        path: A `.npy` of one dimension, or the integers alone, as nanoGPT's `.bin`.
        block_size: Tokens of a window.
        stride: Tokens from one window's begin to the next; None: `block_size`, so that windows don't overlap.
        dtype: Of a file that is no `.npy`, such as uint16 or uint32.
        vocab_size: Tokens must be less. None: they aren't checked.
        document_end: The token that ends a document. Samples then have a third tensor, the number of each token's
            document in its window.

    Raises:
        DataError: The file is missing, damaged, shorter than a window, or doesn't hold such tokens.
    """

    def __init__(
        self,
        path: str | Path,
        block_size: int,
        *,
        stride: int | None = None,
        dtype: str = "uint16",
        vocab_size: int | None = None,
        document_end: int | None = None,
    ) -> None:
        self.path = Path(path).expanduser()
        self.block_size = block_size
        self.stride = block_size if stride is None else stride
        self.vocab_size = vocab_size
        self.document_end = document_end
        if self.block_size < 1 or self.stride < 1:
            raise DataError(f"TokenFile: block_size={block_size} and stride={stride} must be at least 1.")
        if not self.path.is_file():
            raise DataError(f"There is no token file {self.path}.")

        if self.path.suffix == ".npy":
            self._read_header()
        else:
            self._read_size(dtype)
        if self.num_tokens <= block_size:
            raise DataError(
                f"{self.path} has {self.num_tokens:,} tokens, too few for a window of {block_size} and the next token."
            )
        self._descriptor: int | None = None
        self._check_tokens()

    def __len__(self) -> int:
        return (self.num_tokens - self.block_size - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Return the tokens of a window, the token after each, and with `document_end` each token's document: int64."""
        begin = range(len(self))[index] * self.stride
        window = self.read(begin, self.block_size + 1)
        self._check_values(window, begin=begin)
        tokens = torch.from_numpy(window.astype(numpy.int64))
        if self.document_end is None:
            return tokens[:-1], tokens[1:]
        ends = tokens[:-1] == self.document_end
        # A token that ends a document belongs to it.
        documents = ends.cumsum(0) - ends.long()
        return tokens[:-1], tokens[1:], documents

    def read(self, begin: int, number: int) -> numpy.typing.NDArray[Any]:
        """Return `number` tokens from token `begin` on. Raises DataError if the file has become shorter."""
        if self._descriptor is None:
            # Opened in each process that reads. The number is closed with the process.
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        size = number * self.dtype.itemsize
        content = os.pread(self._descriptor, size, self._offset + begin * self.dtype.itemsize)
        if len(content) < size:
            raise DataError(f"{self.path} ends before token {begin + number:,} of {self.num_tokens:,}: it was cut off.")
        return numpy.frombuffer(content, self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open file: another process opens its own."""
        return {**self.__dict__, "_descriptor": None}

    def __del__(self) -> None:
        descriptor = self.__dict__.get("_descriptor")
        if descriptor is not None:
            os.close(descriptor)

    # The file's form

    def _read_header(self) -> None:
        try:
            # Nothing is read of it but its header.
            array = numpy.load(self.path, mmap_mode="r")
        except (ValueError, EOFError, OSError) as error:
            raise DataError(f"{self.path} is no whole .npy file, or cut off: {error}") from error
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"{self.path} has an array of shape {array.shape}, {array.dtype}. It must have one dimension, of "
                "integers: save tokens.astype(numpy.uint16)."
            )
        self.dtype = array.dtype
        self.num_tokens = len(array)
        self._offset = int(array.offset)

    def _read_size(self, dtype: str) -> None:
        try:
            self.dtype = numpy.dtype(dtype)
        except TypeError:
            self.dtype = numpy.dtype("V")
        if self.dtype.kind not in "iu":
            raise DataError(f"TokenFile: dtype={dtype} is no type of integers. Use uint16, uint32 or int32.")
        size = self.path.stat().st_size
        self.num_tokens, left_over = divmod(size, self.dtype.itemsize)
        self._offset = 0
        if left_over:
            raise DataError(
                f"{self.path} has {size:,} bytes, which is no whole number of {self.dtype} tokens: it is cut off, or "
                "its tokens have another dtype."
            )

    # The tokens

    def _check_tokens(self) -> None:
        block = _BLOCK_SIZE // self.dtype.itemsize
        number = -(-self.num_tokens // block)
        most = _CHECKED_WHOLE // _BLOCK_SIZE
        step = max(1, number // most)
        for position in range(0, number, step):
            begin = position * block
            tokens = self.read(begin, min(block, self.num_tokens - begin))
            if position == 0:
                self._check_dtype(tokens)
            self._check_values(tokens, begin=begin)
        # Checking has opened it; a loader process opens its own.
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._descriptor = None

    def _check_dtype(self, tokens: numpy.typing.NDArray[Any]) -> None:
        """Raise DataError for uint32 tokens that are read as uint16: every second one is 0."""
        is_wider = self.path.suffix != ".npy" and self.dtype.itemsize == 2 and len(tokens) >= 64
        if is_wider and not tokens[1::2].any() and tokens[0::2].any():
            raise DataError(
                f"Every second token of {self.path} is 0 when it is read as {self.dtype}: it has 4 bytes a token. Use "
                "dtype=uint32."
            )

    def _check_values(self, tokens: numpy.typing.NDArray[Any], *, begin: int) -> None:
        if self.vocab_size is None:
            return
        largest = int(tokens.max())
        least = int(tokens.min())
        if least >= 0 and largest < self.vocab_size:
            return
        wrong = (tokens < 0) | (tokens >= self.vocab_size)
        place = int(wrong.argmax())
        raise DataError(
            f"Token {begin + place:,} of {self.path} is {int(tokens[place])}, and vocab_size={self.vocab_size}: tokens "
            f"are 0 to {self.vocab_size - 1}. The file was made with another tokenizer, or its tokens aren't "
            f"{self.dtype}."
        )
