"""One model on several processes, each with a GPU of its own and a part of every matrix: tensor
parallelism (Megatron-LM, Shoeybi et al., 2019). torchrun starts the processes and ends them
together; each is a rank.

A rank has its share of the query heads, the key/value heads, hidden_dim and the vocabulary; the
embedding and the norms are replicated. So wqkv, w13 and the output matrix are cut by rows, and all
that follows from those rows (RoPE, keys and values, attention, SwiGLU) is done where they are. wo
and w2 are cut by columns: each rank has one term of their product, and the sum over the ranks is x
again, the same on all of them. Two sums per layer and one gather of the logits at the end are all
the communication there is. All ranks sample from the same logits with the same random number, so
the token need not be sent.

A forward pass is unaware of this: it runs on a table of ops like any other, in which `linear_add`
ends with a sum over the ranks and `rmsnorm_linear` with a gather: through NCCL (gloo on CPUs) or,
if the GPUs reach each other's memory, through the exchange (exchange.py). CUDA graphs contain
either, so on GPUs the host is not in the way."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")
# How long ranks wait for one another, such as while rank 0 waits for the user; if one dies, torchrun
# ends the others
PATIENCE = timedelta(days=20)

# ---- the ranks


@dataclass(frozen=True)
class Ranks:
    """The processes that share a model, as one of them sees them: by default this one alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those of this host, as is the next
    local_size: int = 1

    @classmethod
    def of_torchrun(cls) -> Ranks:
        """The ranks that torchrun started, or the only one of a process that it did not start."""
        if not dist.is_torchelastic_launched():
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return cls(*(int(os.environ[name]) for name in names))

    @cached_property
    def _store(self) -> dist.Store:
        """The key-value store that torchrun keeps for its ranks."""
        return next(iter(dist.rendezvous("env://", timeout=PATIENCE)))[0]

    def join(self, device: torch.device) -> None:
        """Form the process group, which waits until all ranks are there."""
        if self.size == 1 or dist.is_initialized():
            return
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        place = dict(store=self._store, rank=self.rank, world_size=self.size)
        dist.init_process_group(backend, **place, timeout=PATIENCE)

    def broadcast(self, read: Callable[[], Value]) -> Value:
        """What `read` returns, or raises, on rank 0; the others do not call it."""
        return self.gather(read if self.rank == 0 else lambda: None)[0]

    def gather(self, do: Callable[[], Value]) -> list[Value]:
        """What `do` returns on each rank, once all have done it. The first error of a rank is
        raised on all, so that none goes on alone."""
        if self.size == 1:
            return [do()]
        value = error = None
        try:
            value = do()
        except Exception as raised:
            error = raised
        results: list = [None] * self.size
        with self.stopping_together():
            dist.all_gather_object(results, (value, error))
        for _, error in results:
            if error:
                raise error
        return [value for value, _ in results]

    def agree(self, flag: bool) -> bool:
        """Rank 0's flag. It takes much less time than `broadcast`, so that ranks can ask after each
        token whether to go on."""
        if self.size == 1:
            return flag
        value = torch.tensor([flag], dtype=torch.uint8)
        with self.stopping_together():
            dist.broadcast(value, 0)
        return bool(value)

    @contextmanager
    def stopping_together(self) -> Iterator[None]:
        """While this lasts, Ctrl-C ends the process at once, and torchrun ends the others. If each
        rank stopped by itself, they would do so at different tokens and wait for each other for
        ever."""
        if self.size == 1:
            yield
            return
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def finish(self) -> None:
        """Wait until all ranks have done their work, and none reads another's memory any more. The
        process group stays, since destroying it can hang while CUDA graphs with its sums exist."""
        if dist.is_initialized():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.gather(lambda: None)

    def to_report(self, error: Exception) -> Exception | None:
        """The error to report. Returns None if another rank failed first, since later failures are
        consequences. stderr is restored."""
        if self.size == 1:
            return error
        sys.stderr = sys.__stderr__
        if "gloo/transport" in str(error):
            # Ctrl-C may have ended it, and reach this one a moment later; torchrun's SIGTERM is
            # ignored meanwhile
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(0.2)
            error = RuntimeError("another process has ended")
        with suppress(Exception):  # torchrun, which keeps the store, may have gone
            if self._store.add("failures", 1) > 1:
                return None
        return error

    def described(self, exchange: bool, device: torch.device) -> str:
        """How the ranks communicate, for the user to read. exchange: whether they reach each
        other's memory."""
        if self.size == 1:
            return ""
        ranks, library = f"in {self.size} processes", "gloo"
        if device.type == "cuda":
            ranks, library = f"and {self.size - 1} more", "NCCL"
        way = "each other's memory" if exchange else library
        return f" {ranks}, sums through {way}"


# ---- the cut (Config.cut says what a rank has, loading/checkpoint.py which rows and columns)


def share(count: int, rank: int, size: int) -> slice:
    """A rank's share of `count` items; all ranks have equally many. If there are fewer items than
    ranks, neighbours have the same one. If they do not divide evenly (a vocabulary), the shares of
    the last ranks overlap."""
    if count < size:
        start = rank * count // size
        return slice(start, start + 1)
    each = -(-count // size)
    start = min(rank * each, count - each)
    return slice(start, start + each)
