"""Passes over the weights: what one evaluates, and how it is run.

    Cache      keys and values of all sequences, and their tokens
    Pass       the tokens that are evaluated next, as the ops of the model read them
    Passes     the passes over one cache, their memory and their CUDA graphs

engine.py decides which passes there are. A prompt's chunk, several texts of which each goes on by a token,
and proposals that are checked are all passes: segments of sequences, with rows whose logits are wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from launch import Scratch, captured
from model import Llama, q_scales, rope_tables
from products import MAX_FEW
from sampling import Sampler, Sampling, Switches, all_of, send
from texts import check_room

if TYPE_CHECKING:
    from speculation.heads import Head

# How many tokens of a prompt are evaluated at once: enough to be compute-bound, with little
# workspace
PROMPT_CHUNK = {"cpu": 512, "cuda": 2048}
# Lengths of prompts that are captured as CUDA graphs; others are padded to the next one. Up to
# about 190 tokens, a prompt takes as long as reading the weights; beyond, as long as its
# arithmetic, so that a step is at most a twelfth of the length. But 240 and 448 are left out: with
# them cuBLAS takes longer for w13 of 7B or 8B in 16 bits than with 256 and 480. The longest is two
# chunks, since a small remainder would have to read and decode all the weights again
LENGTHS = (1, 8, 16, 32, 48, 64, 96, 128, 160, 192, 208, 224, 256, *range(272, 400, 16), 416)
LENGTHS += (*range(480, 768, 32), *range(768, 2048, 64), *range(2048, 4097, 128))
TEXTS = (1, 2, 4, 8, 16, 32, 64)  # numbers of texts that are captured; others are padded
MOST_TEXTS = TEXTS[-1]
AHEAD = 2  # positions beyond the last of a sequence that a pass launched ahead may write
SPARE = 16  # places that padding writes: as many as a padded segment may have rows


# ---- the cache


class Cache:
    """Keys, values and tokens of all sequences. Each sequence has a run of places of its own, one after
    another: the positions of one begin at its slot's `first`.

    Keys and values of a layer are a tensor [KH, P, D] each, in the model's kv_dtype, so the positions of
    a head are contiguous. After all runs lie the places that padding writes."""

    def __init__(self, model: Llama, slots: int, size: int):
        """size: positions of a sequence."""
        c = model.config
        device = model.device
        self.size = size
        self.run = size + AHEAD  # places of a sequence
        self.spare = slots * self.run
        places = -(-(self.spare + SPARE) // 16) * 16
        shape = (c.n_layers, c.n_kv_heads, places, c.head_dim)
        self.keys = torch.zeros(shape, dtype=model.kv_dtype, device=device)
        self.values = torch.zeros(shape, dtype=model.kv_dtype, device=device)
        self.rope = rope_tables(c, self.run, device)
        self.q_scale = q_scales(c, self.run, device)
        self.tokens = torch.zeros(places, dtype=torch.int32, device=device)  # that at each place
        # What was sampled, one place after the sampled row's own, for the host (pinned memory on a
        # GPU); -1 where logits are not finite
        on_gpu = device.type == "cuda"
        self.drawn = torch.zeros(places, dtype=torch.int32, pin_memory=on_gpu)
        self.scratch = Scratch(device)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first positions of one run to another."""
        for whole in (self.keys, self.values):
            whole[:, :, target : target + count] = whole[:, :, source : source + count]
        self.tokens[target : target + count] = self.tokens[source : source + count]


# ---- a pass


class Segment(NamedTuple):
    """Some tokens of one sequence, one after the other."""

    first: int  # the place of the sequence's position 0
    start: int  # the position of the first of these tokens
    count: int


class Wish(NamedTuple):
    """How the next token of a sequence is chosen."""

    sampling: Sampling
    mask: Tensor | None = None  # int32 [ceil(V / 32)]: a bit for each token that may be; None: all
    bias: Mapping[int, float] | None = None  # added to the logits of these ids
    begins: int = 0  # where its text begins: how many tokens the prompt has


class Pass:
    """T tokens of N sequences that are evaluated next, as the ops read them. These T rows are N segments of
    up to T / N rows, one after the other.

    The P places of the cache belong to sequences, a run of them to each: position p of a sequence is at
    place first + p. Rows after those of the last segment are padding: what ops make of them is written,
    but attention gives them zeros, and no other row reads their keys and values.

    Where the rows lie is one tensor on the device. After a pass whose samples are evaluated next, torch
    adds one to what has moved on, so that a captured graph can be replayed without the host."""

    place: Tensor  # int32 [T]: where each row's token, keys and values lie
    position: Tensor  # int32 [T]: how many tokens of its sequence come before it
    # int32 [N, 4]: first (the place of its sequence's position 0), start (the position of its first
    # row), begin (its first row), count (of its rows, at least 1)
    segments: Tensor

    def __init__(self, model: Llama, cache: Cache, T: int, N: int, one_row: bool, logits: Tensor):
        """one_row: only the logits of the last token are wanted. logits: memory for them, float32
        [at least R, V]."""
        device = cache.tokens.device
        self.spare = cache.spare
        # rows of a segment, at most: the host knows it, a captured graph keeps it
        self.longest = T // N
        # whether what is sampled is evaluated next, so that it is written to tokens as well
        self.feeds = self.longest == 1 or one_row
        self._now_and_step = torch.zeros(2, 2 * T + 4 * N, dtype=torch.int32, device=device)
        self._step = self._now_and_step[1]
        self.lie_in(self._now_and_step[0], T, N)
        # int64 [R]: the rows whose logits are wanted; None if all are
        self.rows: Tensor | None = None
        if one_row:
            self.rows = torch.zeros(1, dtype=torch.int64, device=device)
        self.logits = logits[: 1 if one_row else T]
        self.sampler = Sampler(device, len(self.logits))  # settings of the R sampled rows
        self.sequences: list = []  # whose settings the sampler has, as the engine knows them
        self.switches: Switches | None = None  # of these settings
        self.expected: list[int] = []  # the position of each, if nothing but this pass moves it
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}  # by what the pass does
        # what belongs to the cache and to the model
        self.size = cache.size
        self.tokens = cache.tokens
        self.drawn = cache.drawn
        self.k = cache.keys.unbind()  # L x [KH, P, D]
        self.v = cache.values.unbind()
        # where to keep what enters a layer: its index, and memory for that, [T, C]
        self.kept: tuple[tuple[int, Tensor], ...] = ()
        self.rope = cache.rope
        self.q_scale = cache.q_scale
        self.scratch = cache.scratch
        self.norm_eps = model.config.norm_eps
        self.experts_per_token = model.config.experts_per_token
        self.norm_topk = model.config.norm_topk

    def lie_in(self, now: Tensor, T: int, N: int) -> None:
        """Use this memory, int32 [2 T + 4 N], for where the rows lie."""
        self.now = now
        self.place, self.position, segments = now.split([T, T, 4 * N])
        self.segments = segments.view(N, 4)

    def take(self, segments: list[Segment]) -> None:
        """Evaluate these next. The rows that are left over are padding: of a prompt, rows that all lie at
        one spare place; of several texts, whole segments at spare places."""
        T, N = len(self.place), len(self.segments)
        places: list[int] = []
        positions: list[int] = []
        table: list[int] = []
        moves: list[int] = []
        for first, start, count in segments:
            table += [first, start, len(places), count]
            moves += [0, int(self.feeds), 0, 0]
            places += range(first + start, first + start + count)
            positions += range(start, start + count)
        real = len(places)
        if self.rows is not None:
            self.rows.fill_(real - 1)
        for begin in range(real, T, self.longest) if N > 1 else ():
            table += [self.spare, 0, begin, self.longest]
            moves += [0] * 4
        positions += [i % self.longest if N > 1 else 0 for i in range(T - real)]
        places += [self.spare + position for position in positions[real:]]
        steps = [int(self.feeds)] * real + [0] * (T - real)
        values = places + positions + table + steps + steps + moves
        send(values, self._now_and_step)

    def move(self) -> None:
        """Go on to the tokens that were sampled."""
        if self.feeds:
            self.now.add_(self._step)


# ---- running them


class Moment:
    """A moment in the work of a device. On a GPU it comes when everything launched so far is
    done."""

    def __init__(self, device: torch.device):
        self.time = time.perf_counter()
        self.captures = Passes.captures
        self.event = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self.event:
            self.event.synchronize()

    def since(self, start: Moment) -> float:
        """The seconds from `start` to this moment, once it has come."""
        if self.event:
            return start.event.elapsed_time(self.event) / 1e3
        return self.time - start.time

    def has_captured(self, start: Moment) -> bool:
        """Whether a graph was captured between `start` and this moment, so that the seconds between them
        say nothing about what a pass costs."""
        return self.captures > start.captures


class Passes:
    """The passes over the cache of one model. On a GPU each is a replay of a CUDA graph, which is captured
    the first time."""

    captures: ClassVar[int] = 0  # graphs captured so far, by all instances

    def __init__(self, model: Llama, slots: int = 1, size: int | None = None):
        """slots: sequences that have a place in the cache. size: positions of each, by default the
        model's context."""
        self.model = model
        self.size = size or model.ctx_size
        self.cache = Cache(model, slots, self.size)
        # of the pass that was evaluated last; of a prompt, those of its last token
        most = max(MAX_FEW, self.segments(slots))
        self.logits = torch.zeros(most, model.config.vocab_size, device=model.device)
        self.head: Head | None = None  # which goes on from the model's hidden states
        self._passes: dict[tuple[int, int, bool], Pass] = {}
        self._pool: tuple[int, int] | None = None  # memory that all graphs share

    def get(self, T: int, N: int, one_row: bool = False) -> Pass:
        """The pass of T tokens of N sequences."""
        key = (T, N, one_row)
        if key not in self._passes:
            self._passes[key] = Pass(self.model, self.cache, T, N, one_row, self.logits)
            if one_row and self.head:
                self._passes[key].kept = self.head.kept(T)
        return self._passes[key]

    def segments(self, texts: int) -> int:
        """How many segments a pass of this many texts has."""
        if self.model.uses_graphs:
            return next(n for n in TEXTS if n >= texts)
        return texts

    def write_tokens(self, place: int, ids: list[int]) -> None:
        """Write tokens into the cache. An id of -1, which stands for logits that are not finite, becomes
        0."""
        if ids:
            send([max(id, 0) for id in ids], self.cache.tokens[place : place + len(ids)])

    def set_sampling(self, pass_: Pass, wishes: list[Wish]) -> None:
        """Give the rows of each segment its settings."""
        V = self.model.config.vocab_size
        rows = [wish for wish in wishes for _ in range(pass_.longest)]
        biases = None
        if any(wish.bias for wish in rows):
            biases = torch.zeros(len(rows), V)
            for row, wish in zip(biases, rows):
                for id, bias in (wish.bias or {}).items():
                    row[id] = bias
        settings = [wish.sampling for wish in rows]
        pass_.sampler.set(settings, biases, [wish.begins for wish in rows])
        self.restrict(pass_, [wish.mask for wish in wishes])

    def restrict(self, pass_: Pass, masks: list[Tensor | None]) -> None:
        """Say of each segment which tokens its rows may draw: Wish.mask. Other settings stay."""
        V = self.model.config.vocab_size
        rows = None
        if any(mask is not None for mask in masks):
            known = [all_of(V) if mask is None else mask for mask in masks]
            rows = torch.stack(known).repeat_interleave(pass_.longest, 0)
        pass_.sampler.restrict(rows)
        pass_.switches = pass_.sampler.switches(V)

    # What a pass may do

    def evaluate(self, pass_: Pass) -> None:
        self.run(("evaluate",), pass_, partial(self.model.forward, pass_, pass_.logits))

    def sample(self, pass_: Pass) -> None:
        """Sample from the logits, and move on to what was sampled."""
        self.run(("sample", pass_.switches), pass_, partial(self._sample, pass_))

    def step(self, pass_: Pass) -> None:
        """Both of these."""
        self.run(("step", pass_.switches), pass_, partial(self.advance, pass_))

    def advance(self, pass_: Pass) -> None:
        self.model.forward(pass_, pass_.logits)
        self._sample(pass_)

    def _sample(self, pass_: Pass) -> None:
        self.model.ops.sample(pass_.logits, pass_)
        pass_.move()

    def run(self, what: tuple, pass_: Pass, run: Callable[[], object]) -> None:
        """Call `run`, which is what a pass does; on a GPU as a graph. All graphs share memory, since
        nothing outlives a replay."""
        if not self.model.uses_graphs:
            run()
            return
        if what not in pass_.graphs:
            now = pass_.now.clone()
            logits = pass_.logits.clone()

            def reset() -> None:
                pass_.now.copy_(now)
                pass_.logits.copy_(logits)

            Passes.captures += 1
            graph = captured(run, self.model.device, reset, self._pool)
            self._pool = self._pool or graph.pool()
            pass_.graphs[what] = graph
        pass_.graphs[what].replay()

    # Prompts

    def chunk(self, left: int, most: int | None = None) -> int:
        """How many tokens of a prompt are evaluated at once, if this many are left. most: the bound, if
        it is not the usual one."""
        chunk = most or PROMPT_CHUNK[self.model.device.type]
        longest = chunk
        if self.model.uses_graphs and not most:
            longest = max(LENGTHS)
        return left if left <= longest else chunk

    def evaluate_prompt(self, ids: list[int], start: int, first: int) -> None:
        """Evaluate tokens of a sequence at once, from the position `start` on; `first` is the place of
        its position 0. The last one's logits go to self.logits[0]. On a GPU the tokens are padded to
        the next of LENGTHS."""
        length = len(ids)
        if self.model.uses_graphs:
            length = next(n for n in LENGTHS if n >= length)
        pass_ = self.get(length, 1, one_row=True)
        self.write_tokens(first + start, ids)
        pass_.take([Segment(first, start, len(ids))])

        def run() -> None:
            # Freed at once. Graphs of all lengths find their memory within this block; otherwise
            # each new longest one would add blocks of its own
            if self.model.uses_graphs:
                most = self.model.prompt_memory(min(max(LENGTHS), self.size))
                torch.empty(most, dtype=torch.uint8, device=self.model.device)
            self.model.forward(pass_, pass_.logits)

        self.run(("prompt",), pass_, run)
        if self.head:
            self.head.follow(pass_, first, start, len(ids))

    # Sequences by hand: for drafts, scores, measurements and perplexity

    @torch.inference_mode()
    def prefill(self, ids: list[int], start: int = 0, first: int = 0) -> Tensor:
        """Evaluate tokens of a sequence, chunk by chunk; see evaluate_prompt. Returns the logits of the
        last one, float32 [V]."""
        check_room(start + len(ids), self.size)
        done = 0
        while done < len(ids):
            count = self.chunk(len(ids) - done)
            self.evaluate_prompt(ids[done : done + count], start + done, first)
            done += count
        return self.logits[0]

    @torch.inference_mode()
    def forward(self, ids: list[int], start: int = 0, first: int = 0) -> Tensor:
        """The same for T tokens at once. Returns the logits of all of them, float32 [T, V]."""
        check_room(start + len(ids), self.size)
        pass_ = self.pass_at(start, len(ids), first)
        self.write_tokens(first + start, ids)
        return self.model.forward(pass_, pass_.logits)

    @torch.inference_mode()
    def sample_on(
        self,
        ids: list[int],
        known: int,
        first: int,
        n: int,
        wish: Wish,
    ) -> list[int]:
        """The n tokens that follow ids, of which the first `known` have been evaluated, in the run that
        begins at the place `first`."""
        self.prefill(ids[known:], known, first)
        pass_ = self.get(1, 1)
        pass_.take([Segment(first, len(ids) - 1, 1)])
        self.set_sampling(pass_, [wish])
        pass_.sequences = []
        self.sample(pass_)
        for _ in range(n - 1):
            self.step(pass_)
        Moment(self.model.device).wait()
        place = first + len(ids)
        return self.cache.drawn[place : place + n].tolist()

    def pass_at(self, start: int, count: int, first: int = 0) -> Pass:
        """A pass of `count` tokens of a sequence, from a position on, with the logits of all of them."""
        logits = torch.zeros(count, self.model.config.vocab_size, device=self.model.device)
        pass_ = Pass(self.model, self.cache, count, 1, False, logits)
        pass_.take([Segment(first, start, count)])
        return pass_
