"""What the ranks of a model (processes.py) send each other: sums and gathers, and the ops that end in
them."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from experts import Routing, SingleRoute
from formats import Matrix
from launch import (
    gdc_launch_dependents,
    gdc_wait,
    jit,
    launch,
    processors,
    saturated,
    tl,
    triton,
)
from products import (
    MAX_FEW,
    Epilogue,
    Product,
    Stack,
    is_fused,
    launch_product,
    launch_single,
)
from ranks.processes import Ranks, share

if TYPE_CHECKING:
    from passes import Pass

# ---- the exchange: sums and gathers through the memory of the other GPUs, which takes a fraction of
#      the time of a call of NCCL.
#
#      Up to 16 tokens. A pass of a 7B model takes 64 sums, of 4,096 values per token: what counts is
#      latency, not bandwidth. A flag that says "all is written" would need a fence and a second trip,
#      so this is NCCL's low-latency protocol: each value travels with the number of its sum, in an
#      entry of eight bytes, and eight bytes arrive whole. The product kernel writes an entry for each
#      of its results to every rank; a small kernel, started early by programmatic dependent launch,
#      polls the entries in its own rank's memory until all of them bear this sum's number, and adds
#      them up. Numbers repeat after 2^32 sums.
#
#      A prompt, or a few tokens where we have no kernel for their product. Here bandwidth counts,
#      so terms have no numbers. Each rank computes its own in its own memory; then a kernel on each
#      rank waits until those of all ranks are there, reads them, and adds them up in the same order
#      everywhere. To wait, the programs of that kernel meet: each sets a flag in the memory of every
#      other rank to the number of such sums it has taken part in, and waits until its twins have set
#      its own.
#
#      Why nothing is overwritten before it is read. There are two inboxes for entries and two buffers
#      for terms, of which wo has one and w2 the other, and an inbox for the logits. So between two
#      uses of one of them lies a sum or a gather in another, for which each rank needs something from
#      all others; and a rank sends its part, or sets its flags, only after all its earlier kernels
#      have ended, so after it has read what came before.


@jit
def _number(number):
    """A sum's number in the upper half of an entry."""
    return tl.load(number).to(tl.int64) << 32


@jit
def _receive(pointers, mask, number):
    """The float32 values of entries, once they all bear this number; zero where the mask is off.
    volatile: loaded anew each time, bypassing the L1 cache, and in this order."""
    entries = tl.load(pointers, mask=mask, other=0, volatile=True)
    while tl.sum((mask & (((entries ^ number) >> 32) != 0)).to(tl.int32)) > 0:
        entries = tl.load(pointers, mask=mask, other=0, volatile=True)
    return entries.to(tl.int32).to(tl.float32, bitcast=True)


class Peers(NamedTuple):
    """The sizes of the epilogue that sends."""

    ranks: int


@jit
def _prepare_entries(args, rows, t, T, N, TOKENS: tl.constexpr, SIZES: tl.constexpr):
    """The indices, this sum's number, which does not change within a round, and each rank's
    inbox."""
    RANKS: tl.constexpr = SIZES.ranks
    inboxes = ()
    for rank in tl.static_range(RANKS):
        inboxes += (tl.load(args[0] + rank).to(tl.pointer_type(tl.int64)),)
    return rows, t, _number(args[1]), inboxes


@jit
def _store_entries(
    args, y, ready, T, N, ROWS: tl.constexpr, TOKENS: tl.constexpr, SIZES: tl.constexpr
):
    """An epilogue: y written as entries [T, N] to every rank. args: the addresses of the inboxes,
    one per rank, and the number."""
    RANKS: tl.constexpr = SIZES.ranks
    rows, t, number, inboxes = ready
    entries = number | (y.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    for rank in tl.static_range(RANKS):
        tl.store(inboxes[rank] + t * N + rows, entries, mask=(rows < N) & (t < T))


@jit
def _add_received_kernel(
    entries, number, residual, N,
    ROOM: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual [N] += the sum of what the ranks sent. entries [RANKS, ROOM]"""
    gdc_launch_dependents(PDL)
    offs_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))
    mask = (ranks[:, None] < RANKS) & (offs_n[None, :] < N)
    values = _receive(entries + ranks[:, None] * ROOM + offs_n[None, :], mask, _number(number))
    gdc_wait(PDL)  # for the residual's writer
    old = tl.load(residual + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    new = (old + tl.sum(values, 0)).to(residual.dtype.element_ty)
    tl.store(residual + offs_n, new, mask=offs_n < N)


@jit
def _gather_received_kernel(
    entries, number, out, N: tl.constexpr, V: tl.constexpr,
    ROOM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[v] = what the rank that has row v sent. entries [ranks, ROOM], out [V]; rank p sends N
    rows, of which the first is min(p N, V - N)."""
    gdc_launch_dependents(PDL)
    offs_v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rank = offs_v // N
    offs = rank * ROOM + offs_v - tl.minimum(rank * N, V - N)
    values = _receive(entries + offs, offs_v < V, _number(number))
    gdc_wait(PDL)
    tl.store(out + offs_v, values, mask=offs_v < V)


@jit
def _add_terms_kernel(
    terms, flags, own_flags, sums, residual, N, RANK: tl.constexpr,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, FP16_SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual [N] += the sum of the ranks' terms [N], once all are there. terms, flags [RANKS]:
    the addresses of each rank's terms, and of what this one, RANK, sets in each rank's flags.
    own_flags [programs, RANKS]; sums [programs]: how many each program has taken part in."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    number = tl.atomic_add(sums + pid, 1) + 1
    # "release" and "acquire": whoever sees a flag also sees the terms written before it was set
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            theirs = tl.load(flags + rank).to(own_flags.dtype)
            tl.atomic_xchg(theirs + pid * RANKS, number, sem="release", scope="sys")
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            own = own_flags + pid * RANKS + rank
            while tl.atomic_add(own, 0, sem="acquire", scope="sys") - number < 0:
                pass
    tl.debug_barrier()
    for start in range(pid * BLOCK, N, programs * BLOCK):
        offs_n = start + tl.arange(0, BLOCK)
        mask = offs_n < N
        total = tl.load(residual + offs_n, mask=mask, other=0.0).to(tl.float32)
        for rank in tl.static_range(RANKS):
            term = tl.multiple_of(tl.load(terms + rank).to(residual.dtype), 16)
            total += tl.load(term + offs_n, mask=mask, other=0.0).to(tl.float32)
        y = saturated(total, FP16_SUMS).to(residual.dtype.element_ty)
        tl.store(residual + offs_n, y, mask=mask)


# Programs of that kernel for each streaming multiprocessor, at most. All must run at once, since each
# waits for its twins
PROGRAMS_PER_SM = 4
# The most bytes that a rank reads from the others for a sum. Beyond that NCCL is as fast, since
# each rank adds up a share only
READ_AT_MOST = 16 << 20


class Shared(NamedTuple):
    """A tensor that every rank has, in memory that the others can reach."""

    own: Tensor
    addresses: list[int]  # of each rank's


class Inbox(NamedTuple):
    """Where the entries of a product arrive."""

    addresses: Tensor  # int64 [ranks]: where this rank's entries begin in each rank's inbox
    entries: Tensor  # int64 [ranks, room]: this rank's inbox, in which each rank has its own part
    number: Tensor  # int32 [1]: the upper halves of entries of this round


class Exchange:
    """What the ranks exchange lies here: in inboxes if it is for a few tokens, otherwise in two
    buffers of terms."""

    def __init__(
        self, matrices: list[Matrix], rank: int, entries: Shared, terms: Shared, flags: Shared
    ):
        """matrices: whose products are exchanged, in the same order on all ranks: wo and w2 of each
        layer in turn, then the output. entries: int64 [3, ranks, room], room for MAX_FEW terms of a
        sum and for a rank's logits. terms [2, room], flags int32 [programs, ranks]. entries and
        flags are zero."""
        device = entries.own.device
        self.rank = rank
        self.ranks = len(entries.addresses)
        self.numbers = torch.arange(1, 1 + len(matrices), dtype=torch.int32, device=device)
        self.inboxes: dict[Matrix, Inbox] = {}
        self.buffers: dict[Matrix, tuple[Tensor, Tensor]] = {}  # all addresses, own terms
        self.room = terms.own[0].numel()
        part = entries.own[0, 0].nbytes

        def addresses(of_ranks: list[int], offset: int) -> Tensor:
            return torch.tensor([address + offset for address in of_ranks], device=device)

        inboxes = [
            (addresses(entries.addresses, (turn * self.ranks + rank) * part), own)
            for turn, own in enumerate(entries.own)
        ]
        buffers = [
            (addresses(terms.addresses, turn * own.nbytes), own)
            for turn, own in enumerate(terms.own)
        ]
        for i, w in enumerate(matrices):
            turn = 2 if w is matrices[-1] else i % 2
            self.inboxes[w] = Inbox(*inboxes[turn], self.numbers[i : i + 1])
            self.buffers[w] = buffers[i % 2]
        self.own_flags = flags.own
        self.flags = addresses(flags.addresses, flags.own.itemsize * rank)
        self.sums = torch.zeros(len(flags.own), dtype=torch.int32, device=device)

    def sends(self, x: Tensor, w: Matrix, routes: Routing | None) -> bool:
        """Whether linear_add takes this product: one or, without experts, a few tokens."""
        if routes is not None:
            return len(x) == 1
        return len(x) <= MAX_FEW and is_fused(Product("linear_add", x, w))

    def linear_add(
        self, x: Tensor, w: Matrix, residual: Tensor, routes: SingleRoute | None = None
    ) -> Tensor:
        """residual += x W^T over all ranks, in place, as kernels.linear_add does. x [T, K], W [C,
        K], residual [T, C]"""
        assert len(residual) == len(x) and residual.is_contiguous(), (residual.shape, x.shape)
        if routes is None:
            self.send(Product("linear_add", x, w))
        else:
            product = Product("experts_linear_add", x[0], w)
            self.send(product, routes.w2_stack(residual.shape[1]))
        return self.add_received(w, residual)

    def rmsnorm_linear(self, x: Tensor, norm: Tensor, w: Matrix, eps: float, out: Tensor) -> Tensor:
        """out = rmsnorm(x) W^T, over the rows of W on all ranks. x [1, C], out float32 [1, V]"""
        assert len(out) == 1 and out.is_contiguous(), out.shape
        self.send(Product("rmsnorm_linear", x, w, norm, eps))
        return self.gather_received(w, out)

    def end_round(self) -> None:
        """Give all sums their next numbers. A kernel that overlaps no other does this, so that
        kernels may read the numbers before they wait."""
        self.numbers += len(self.numbers)

    def send(self, product: Product, stack: Stack | None = None) -> None:
        """Launch a product that ends in the inboxes of its matrix on all ranks."""
        addresses, _, number = self.inboxes[product.w]
        args = (addresses, number)
        epilogue = Epilogue(_prepare_entries, _store_entries, Peers(self.ranks))
        if stack is None:
            launch_product(product, epilogue, args)
        else:
            launch_single(product, epilogue, args, stack)

    def add_received(self, w: Matrix, residual: Tensor) -> Tensor:
        block = 128  # one warp, so that nothing waits for other warps
        _, entries, number = self.inboxes[w]
        N = residual.numel()
        args = (entries, number, residual, N)
        sizes = dict(ROOM=entries.shape[1], RANKS=self.ranks, BLOCK=block, warps=1)
        launch(_add_received_kernel, (triton.cdiv(N, block),), residual.device, *args, **sizes)
        return residual

    def has_room(self, residual: Tensor) -> bool:
        """Whether terms of this shape fit into the buffers."""
        return residual.numel() <= self.room

    def term(self, w: Matrix, residual: Tensor) -> Tensor:
        """Where this rank's term of a sum with this shape belongs."""
        _, own = self.buffers[w]
        return own[: residual.numel()].view(residual.shape)

    def add_terms(self, w: Matrix, residual: Tensor, fp16_sums: bool) -> Tensor:
        """residual += the sum of all ranks' terms. fp16_sums: whether it is kept in the range of
        fp16."""
        addresses, _ = self.buffers[w]
        N, block = residual.numel(), 4096
        programs = min(triton.cdiv(N, block), len(self.sums))
        args = (addresses, self.flags, self.own_flags, self.sums, residual, N)
        ranks = dict(RANK=self.rank, RANKS=self.ranks)
        sizes = dict(BLOCK=block, FP16_SUMS=fp16_sums, warps=8)
        launch(_add_terms_kernel, (programs,), residual.device, *args, **ranks, **sizes)
        return residual

    def gather_received(self, w: Matrix, out: Tensor) -> Tensor:
        V = out.shape[1]
        block = 256
        _, entries, number = self.inboxes[w]
        args = (entries, number, out)
        sizes = dict(N=w.rows, V=V, ROOM=entries.shape[1], BLOCK=block, warps=1)
        launch(_gather_received_kernel, (triton.cdiv(V, block),), out.device, *args, **sizes)
        return out


def make_exchange(
    ranks: Ranks,
    matrices: list[Matrix],
    C: int,
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
) -> Exchange | None:
    """Set up the exchange of the ranks. Returns None unless every GPU can reach the others'
    memory. All ranks call this together, and either all get an exchange or none. matrices: see
    Exchange. C: the length of a sum for one token. dtype: of the terms."""
    on_one_host = backend == "triton" and device.type == "cuda" and ranks.local_size == ranks.size
    others = [i for i in range(ranks.size) if i != ranks.local_rank]
    reach = lambda other: torch.cuda.can_device_access_peer(device.index, other)
    reaches_all = on_one_host and all(map(reach, others))
    if not all(ranks.gather(lambda: reaches_all)):
        return None
    import torch.distributed._symmetric_memory as symmetric_memory

    def shared(*shape: int, dtype: torch.dtype) -> Shared:
        own = symmetric_memory.empty(*shape, dtype=dtype, device=device)
        buffers = symmetric_memory.rendezvous(own, group=dist.group.WORLD).buffer_ptrs
        return Shared(own.zero_(), list(buffers))

    entries = shared(3, ranks.size, max(MAX_FEW * C, matrices[-1].rows), dtype=torch.int64)
    room = READ_AT_MOST // (ranks.size - 1) // 16 * 16  # since 16 bytes are read at once
    terms = shared(2, room // dtype.itemsize, dtype=dtype)
    flags = shared(PROGRAMS_PER_SM * processors(device), ranks.size, dtype=torch.int32)
    exchange = Exchange(matrices, ranks.rank, entries, terms, flags)
    torch.cuda.synchronize()
    ranks.gather(lambda: None)  # all are zero before anyone writes
    return exchange


# ---- the ops


def cut_ops(
    ranks: Ranks, ops: SimpleNamespace, exchange: Exchange | None, fp16_sums: bool
) -> SimpleNamespace:
    """The ops of a model that is cut: `ops`, except for the two that involve all ranks.
    fp16_sums: whether sums are kept within the range of fp16."""

    def linear_add(x: Tensor, w: Matrix, residual: Tensor, routes: Routing | None = None) -> Tensor:
        if exchange and exchange.sends(x, w, routes):
            return exchange.linear_add(x, w, residual, routes)
        if exchange and exchange.has_room(residual):
            ops.linear_store(x, w, exchange.term(w, residual), routes)
            return exchange.add_terms(w, residual, fp16_sums)
        # The residual is one more term of the sum, which rank 0 adds
        ops.linear_add(x, w, residual if ranks.rank == 0 else residual.zero_(), routes)
        dist.all_reduce(residual)
        return residual.clamp_(-65504.0, 65504.0) if fp16_sums else residual

    def rmsnorm_linear(x: Tensor, norm: Tensor, w: Matrix, pass_: Pass, out: Tensor) -> Tensor:
        if exchange and len(x) == 1:
            exchange.rmsnorm_linear(x, norm, w, pass_.norm_eps, out)
        else:
            part = ops.rmsnorm_linear(x, norm, w, pass_, out.new_empty(len(x), w.rows))
            parts = part.new_empty(ranks.size * len(part), w.rows)
            dist.all_gather_into_tensor(parts, part)
            for rank, columns in enumerate(parts.chunk(ranks.size)):
                out[:, share(out.shape[1], rank, ranks.size)] = columns
        if exchange:
            exchange.end_round()
        return out

    own = dict(linear_add=linear_add, rmsnorm_linear=rmsnorm_linear)
    return SimpleNamespace(**vars(ops) | own)
