"""Trained heads as proposers (EAGLE-3: Li et al., 2025): a layer that goes on from the model's own hidden
states. head_file.py reads one.

    h = fc(the states that enter three of the model's layers, side by side)
    x = [rmsnorm(embedding), rmsnorm(h)]
    h' = h + attention(x);  h' += feed_forward(h');  logits = output(rmsnorm(h'))

A token stands beside the state of the position before it, so h' says what follows the token. fc is
for positions that the model has evaluated; to propose further, the head goes on from its own h'.
Tokens, places and positions are the model's; keys and values are the head's own, from position 1 on.
After each pass the head evaluates what was accepted with the model's states. Of these rows only the
last goes through attention: of the others nothing but keys and values is needed, as of a prompt.

At temperature 0 the head proposes its most probable token, otherwise the one that the model's own
random numbers draw from its logits. It counts if it is what the model draws: proposals.py.

Head is the proposer, and Chain what it does on a device without the host. Rejected proposals
leave keys and values behind, which are overwritten before a row sees them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from passes import LENGTHS, PROMPT_CHUNK, Cache, Pass, Passes, Wish
from products import MAX_FEW, fit_norm
from sampling import mask_without, send
from speculation.proposals import Proposer

if TYPE_CHECKING:
    from engine import Sequence
    from speculation.head_file import HeadWeights

# ---- the proposer


class Head(Proposer):
    """Proposes what a head says. It follows every text from its prompt on."""

    only_chains = True

    def __init__(self, n: int, passes: Passes, weights: HeadWeights):
        """passes: the model's."""
        super().__init__(n)
        model = passes.model
        slots = passes.cache.spare // passes.cache.run
        self.model = model
        self.ops = model.whole_ops
        self.weights = weights
        # What Cache and Pass read of a model
        self.config = weights.config
        self.device = model.device
        self.kv_dtype = model.kv_dtype
        self.cache = Cache(self, slots, passes.size)
        self.cache.tokens = passes.cache.tokens
        self.cache.drawn = torch.zeros_like(passes.cache.tokens)
        self.target = passes
        passes.head = self
        if model.backend == "triton":
            fit_norm(weights.layer.ffn_norm, weights.layer.w13)
            fit_norm(weights.norm, weights.output)
        rows = min(passes.size, PROMPT_CHUNK["cpu"])
        if model.uses_graphs:
            rows = next((n for n in LENGTHS if n >= passes.size), LENGTHS[-1])
        rows = max(rows, MAX_FEW)
        zeros = partial(torch.zeros, dtype=model.dtype, device=model.device)
        self.inputs = zeros(rows, weights.fc.columns)  # the model's states, side by side
        # What fc makes of them, row 0 for the position before
        self.states = zeros(1 + rows, self.config.dim)
        # Of each run, and for padding, the state of the last position that the model has evaluated
        self.last = zeros(slots + 1, self.config.dim)
        self.counts: dict[int, int] = {}  # how many tokens of each run have keys and values
        self.stated: set[int] = set()  # runs whose last state is that of the last of these
        self.own_logits = torch.zeros(MAX_FEW, self.config.vocab_size, device=model.device)
        V = model.config.vocab_size
        self.mask = mask_without({*range(V)} - {*weights.ids.tolist()}, V)  # of what it knows
        self.chains: dict[tuple[int, int], Chain] = {}
        self.passes_of: dict[int, Pass] = {}

    # The head

    def join(self, T: int) -> Tensor:
        """States of T positions [T, C], from what was kept of the model's."""
        return self.ops.linear_store(self.inputs[:T], self.weights.fc, self.states[1 : 1 + T])

    def begin(self, h: Tensor, pass_: Pass) -> tuple[Tensor, Tensor]:
        """From tokens and states to queries and to the residual. Keys and values go to the cache."""
        w, ops = self.weights, self.ops
        x = ops.side_by_side(w.embedding, w.norms, h, pass_)
        if w.norm_before_residual:
            h = x[:, self.config.dim :].contiguous()
        return ops.rmsnorm_qkv_rope(x, w.layer, pass_), h

    def finish(self, q: Tensor, h: Tensor, pass_: Pass) -> Tensor:
        """From queries and the residual, which is changed, to the next state. Samples what follows."""
        w, ops = self.weights, self.ops
        h = ops.linear_add(ops.attention(q, w.layer, pass_), w.layer.wo, h)
        h = ops.linear_add(ops.rmsnorm_swiglu(h, w.layer, pass_), w.layer.w2, h)
        own = self.own_logits[: len(h)]
        ops.rmsnorm_linear(h, w.norm, w.output, pass_, own)
        # By torch, so that the next step's attention may read keys and values early: see launch.py
        pass_.logits.index_copy_(1, w.ids, own)
        ops.sample(pass_.logits, pass_)
        return ops.rmsnorm(h, w.norm, pass_.norm_eps) if w.norm_output else h

    def guess_like(self, wish: Wish) -> Wish:
        """How a proposal is chosen, to be what the model chooses: among what the head knows. Where
        min-p leaves only probable tokens, top-k and top-p go: no fewer proposals are accepted, and each
        takes 16 of 117 us less (8B in e4m3 on an H200)."""
        sampling = wish.sampling
        if sampling.min_p > 0:
            sampling = replace(sampling, top_k=0, top_p=1)
        mask = self.mask if wish.mask is None else wish.mask & self.mask
        return wish._replace(sampling=sampling, mask=mask)

    # What the engine tells it

    def chain(self, texts: int, n: int) -> Chain:
        if (texts, n) not in self.chains:
            self.chains[texts, n] = Chain(self, texts, n)
        return self.chains[texts, n]

    def kept(self, T: int) -> tuple[tuple[int, Tensor], ...]:
        """Memory for the hidden states of a pass of T tokens: Pass.kept."""
        layers = self.weights.layers
        return tuple(zip(layers, self.inputs[:T].chunk(len(layers), 1)))

    def follow(self, pass_: Pass, first: int, start: int, count: int) -> None:
        """Evaluate what a pass has evaluated: `count` tokens of a prompt, from the position `start`
        on."""
        T = len(pass_.place)
        if T not in self.passes_of:
            self.passes_of[T] = Pass(self, self.cache, T, 1, True, self.target.logits)
        own = self.passes_of[T]
        own.now.copy_(pass_.now)
        index = first // self.cache.run
        if first in self.stated and self.counts[first] == start:
            self.states[0] = self.last[index]
        else:
            own.place[0] = self.cache.spare  # without the state before it there is no first row

        def run() -> None:
            self.join(T)
            self.begin(self.states[:T], own)

        self.target.run(("follow",), own, run)
        self.last[index] = self.states[count]
        self.note(first, start + count)

    def reuse(self, source: int, target: int, count: int) -> int:
        count = min(count, self.counts.get(source, 0))
        if source != target:
            self.cache.copy(source, target, count)
        self.counts[target] = count
        self.stated.discard(target)
        return self.evaluated(target)

    def evaluated(self, first: int) -> int:
        """Where the last state was not kept, one less than have keys and values."""
        return max(self.counts.get(first, 0) - (first not in self.stated), 0)

    def note(self, first: int, count: int) -> None:
        self.counts[first] = count
        self.stated.add(first)


# ---- without the host


class Chain:
    """How the device goes on with N texts by itself: it evaluates their last tokens with n proposals,
    samples, and proposes again. To run as a graph it has `now`, `logits` and `graphs`, as a Pass does.
    Where the rows of its passes lie is one tensor, `now`, since all move on together: `pos` stands for
    the position of a text's last token, which is evaluated next."""

    def __init__(self, head: Head, N: int, n: int):
        model, rows = head.model, N * (1 + n)
        self.head = head
        self.shape = (N, n)
        self.sequences: list[Sequence] = []
        # Passes that sample, and how: see Passes.set_sampling
        self.sampling: list[tuple[Pass, list[Wish]]] = []
        logits = head.target.logits
        self.logits = logits[:rows]
        self.target = Pass(model, head.target.cache, rows, N, False, logits)
        self.target.kept = head.kept(rows)
        self.target.drawn = head.cache.drawn
        self.target.feeds = True
        self.rest = Pass(head, head.cache, rows, N, False, logits)
        guesses = torch.zeros(N, model.config.vocab_size, device=model.device)
        self.steps = [Pass(head, head.cache, N, N, False, guesses) for _ in range(n)]
        # Each pass with the distance from pos of its first row, and how many rows a text has
        self.layout = [(self.target, 0, 1 + n), (self.rest, 1, 1 + n)]
        self.layout += [(step, i, 1) for i, step in enumerate(self.steps)]
        sizes = [len(pass_.now) for pass_, *_ in self.layout]
        numbers = partial(torch.zeros, dtype=torch.int32, device=model.device)
        # For each number in `now` whose text it moves on with; N if it stays
        self.now, self.text = numbers(2, sum(sizes))
        for (pass_, *_), now in zip(self.layout, self.now.split(sizes)):
            pass_.lie_in(now, len(pass_.place), N)
        for step in self.steps:
            step.sampler = self.steps[0].sampler
        self.counts = numbers(N + 1)  # by how many tokens each text has moved on, and 0
        # What was proposed to follow each row, and what was drawn
        self.found = numbers(2, N, 1 + n)
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.ends = torch.arange(1 + n, device=model.device) == n  # what follows it is not proposed
        self.first_rows = torch.arange(0, rows, 1 + n, device=model.device)
        self.runs = torch.zeros(N, dtype=torch.int64, device=model.device)

    @property
    def switches(self) -> tuple:
        return self.target.switches, self.steps[0].switches

    def take(self, sequences: list[Sequence]) -> None:
        """Go on with these texts."""
        N, _ = self.shape
        spare = self.head.cache.spare
        self.sequences = [*sequences]
        # Where each text begins, where it is, and with which of `counts` it moves on
        texts = [(s.slot.first, s.pos, i) for i, s in enumerate(sequences)]
        texts += [(spare, 1, N)] * (N - len(sequences))
        values: list[int] = []
        moves: list[int] = []
        for pass_, distance, count in self.layout:
            rows = [(*text, distance + t) for text in texts for t in range(count)]
            values += [first + pos + t for first, pos, _, t in rows]
            values += [pos + t for _, pos, _, t in rows]
            moves += 2 * [turn for *_, turn, _ in rows]
            # The head has no keys and values of position 0
            ahead = int(pass_ is not self.target)
            for i, (first, pos, turn) in enumerate(texts):
                values += [first + ahead, pos + distance - ahead, i * count, count]
                moves += [N, turn, N, N]
        runs = [first // self.head.cache.run for first, *_ in texts]
        for table, new in ((self.now, values), (self.text, moves), (self.runs, runs)):
            send(new, table)
        wishes = [s.wish for s in sequences]
        guesses = [self.head.guess_like(wish) for wish in wishes]
        self.sampling = [(self.target, wishes), (self.steps[0], guesses)]

    def propose(self) -> None:
        """Propose what may follow the texts."""
        h = self.head.last.index_select(0, self.runs)
        self.go_on(*self.head.begin(h, self.steps[0]))

    def go_on(self, q: Tensor, h: Tensor) -> None:
        """Propose, from queries and the residual of the texts' last tokens."""
        for i, step in enumerate(self.steps):
            if i > 0:
                q, h = self.head.begin(h, step)
            h = self.head.finish(q, h, step)

    def verify(self) -> None:
        """Evaluate what was proposed, and propose what may follow that."""
        N, _ = self.shape
        head, model, target = self.head, self.head.model, self.target
        behind = self.rest.place
        proposed, drawn = self.found
        torch.index_select(target.tokens, 0, behind, out=proposed.view(-1))
        model.forward(target, target.logits)
        model.ops.sample(target.logits, target)  # writes what it draws over the proposals
        torch.index_select(target.drawn, 0, behind, out=drawn.view(-1))
        missed = (proposed != drawn) | self.ends
        accepted = missed.view(torch.uint8).argmax(1)  # the first that is
        last_rows = self.first_rows + accepted
        states = head.join(len(behind))
        head.last.index_copy_(0, self.runs, states.index_select(0, last_rows))
        q, h = head.begin(states, self.rest)
        torch.add(accepted, 1, out=self.counts[:N])
        self.now.add_(self.counts.index_select(0, self.text))
        self.go_on(q.index_select(0, last_rows), h.index_select(0, last_rows))
