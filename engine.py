"""Several sequences at once: which of their tokens the next pass evaluates, and what becomes of what it
samples.

A pass evaluates some tokens of some sequences: a chunk of one prompt, or the last token of every text
that is being written, each with proposals for what may follow it. One function composes passes
(Engine.step), one runs them (Engine._run), and one reads what they have sampled (Engine._read).

    Cache      keys and values of all sequences, and their tokens
    Pass       the tokens that are evaluated next, as the ops of the model read them
    Sequence   one text: its prompt, its settings, its limit, who takes its tokens
    Slot       a sequence's place in the cache, which outlives it: what a later prompt has in common
               with it is not evaluated again
    Engine     the loop

On a GPU a pass is a replay of a CUDA graph, and the host is one pass ahead: while it reads what one pass
has sampled, the next is running. Tokens and positions stay on the device meanwhile. So a text whose end
the host has not seen yet may take part in one more pass, for which its slot has room.

With several texts, rounding depends on how many tokens a pass has: the same seed gives the same text
only in the same company. Everything else is as if each text were alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import astuple, dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from launch import Scratch, captured
from model import Llama, not_finite, rope_table
from products import MAX_FEW
from sampling import Sampler, Sampling, Switches, mask_without
from speculation.proposals import Proposer, agreeing

# How many tokens of a prompt are evaluated at once: enough to be compute-bound, with little
# workspace
PROMPT_CHUNK = {"cpu": 512, "cuda": 2048}
CHUNK_BESIDE = 512  # while other texts wait for their next token
# Numbers of tokens that are captured as CUDA graphs; a prompt is padded to the next one. Up to
# about 190 tokens, a prompt takes as long as reading the weights; beyond, as long as its
# arithmetic, so that a step is at most a twelfth of the length. The longest is two chunks, since a
# small remainder would have to read and decode all the weights again
LENGTHS = (1, 8, 16, 32, 48, 64, 96, 128, 160)
LENGTHS += (*range(192, 384, 16), *range(384, 768, 32), *range(768, 2048, 64))
LENGTHS += tuple(range(2048, 4097, 128))
TEXTS = (1, 2, 4, 8, 16)  # numbers of texts that are captured; others are padded
MOST_TEXTS = TEXTS[-1]
AHEAD = 2  # positions behind the last of a sequence that a pass launched ahead may write
SPARE = 16  # places that padding writes: as many as a padded segment may have rows
SCORES_AT_ONCE = 1 << 22  # logits of a prompt's tokens that are in memory together


class ContextFull(ValueError):
    """There are more tokens than the context holds."""


# ---- the cache


class Cache:
    """Keys, values and tokens of all sequences. Each sequence has a run of places of its own, one after
    another: the positions of one begin at its slot's `first`.

    Keys and values of a layer are a tensor [KH, P, D] each, in the model's kv_dtype, so the positions of
    a head are contiguous. Behind all runs lie the places that padding writes."""

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
        self.rope = rope_table(c, self.run).to(device)  # [positions, D/2, 2]
        # The token at each place; what was sampled is there once more for the host
        self.tokens = torch.zeros(places, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self.drawn = torch.zeros(places, dtype=torch.int32, pin_memory=pinned)
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


class Pass:
    """T tokens of N sequences that are evaluated next, N segments of up to T / N rows: attention.PassView.

    Where they lie is one tensor on the device. After a pass whose samples are evaluated next, torch adds
    one to what has moved on, so that a captured graph can be replayed without the host."""

    def __init__(self, model: Llama, cache: Cache, T: int, N: int, one_row: bool, logits: Tensor):
        """one_row: only the logits of the last token are wanted. logits: memory for them, float32
        [at least R, V]."""
        device = cache.tokens.device
        self.spare = cache.spare
        self.longest = T // N
        self.feeds = self.longest == 1 or one_row
        self._now_and_step = torch.zeros(2, 2 * T + 4 * N, dtype=torch.int32, device=device)
        self.now, self._step = self._now_and_step
        self.place, self.position, segments = self.now.split([T, T, 4 * N])
        self.segments = segments.view(N, 4)
        self.rows: Tensor | None = None
        if one_row:
            self.rows = torch.zeros(1, dtype=torch.int64, device=device)
        self.logits = logits[: 1 if one_row else T]
        self.sampler = Sampler(device, len(self.logits))
        self.sequences: list[Sequence] = []  # whose settings the sampler has
        self.switches: Switches | None = None  # of these settings
        self.expected: list[int] = []  # the position of each, if nothing but this pass moves it
        # what belongs to the cache and to the model
        self.size = cache.size
        self.tokens = cache.tokens
        self.drawn = cache.drawn
        self.k = cache.keys.unbind()
        self.v = cache.values.unbind()
        self.rope = cache.rope
        self.scratch = cache.scratch
        self.norm_eps = model.config.norm_eps
        self.experts_per_token = model.config.experts_per_token
        self.norm_topk = model.config.norm_topk

    def take(self, segments: list[Segment]) -> None:
        """Evaluate these next. The rows that they leave are padding: of a prompt, copies of nothing at a
        spare place; of several texts, whole segments there."""
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
        steps = [int(self.feeds and i < real) for i in range(T)]
        values = [places + positions + table, steps + steps + moves]
        self._now_and_step.copy_(
            on_its_way(values, torch.int32, self.place.device), non_blocking=True
        )

    def move(self) -> None:
        """Go on to the tokens that were sampled."""
        if self.feeds:
            self.now.add_(self._step)


def on_its_way(values: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values in memory from which a GPU copies while the host goes on."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


# ---- sequences


@dataclass
class Timings:
    """Of a text, or of several added up.

    What the caller does between tokens does not count: the seconds are those between asking for a
    token and getting it or, if that is more, those that its passes took."""

    prompt_tokens: int = 0  # those evaluated, without what the cache already had
    prompt_seconds: float = 0.0
    new_tokens: int = 0
    steps: int = 0  # new tokens except the first of each text, whose time counts as the prompt's
    step_seconds: float = 0.0

    def __add__(self, other: Timings) -> Timings:
        return Timings(*(a + b for a, b in zip(astuple(self), astuple(other))))


class Score(NamedTuple):
    """The log-probability of a token, by the model's own logits: no setting changes it."""

    logprob: float
    best: list[tuple[int, float]]  # the most probable tokens at this place, and theirs


class Constraint(Protocol):
    """What tokens may come next, as a schema or a grammar has it."""

    def accept(self, token: int) -> None:
        """Take note of a token that was sampled."""

    def mask(self) -> Tensor:
        """int32 [ceil(V / 32)]: a bit for each token that may come next."""


class Sequence:
    """One text: a prompt, and how it goes on."""

    def __init__(
        self,
        prompt: list[int],
        take: Callable[[int, Score | None], bool],
        n: int = -1,
        sampling: Sampling = Sampling(),
        eos: Collection[int] = (),
        ignore_eos: bool = False,
        progress: Callable[[int, int], None] | None = None,
        scores: int | None = None,
        prompt_scores: Callable[[list[Score]], None] | None = None,
        constraint: Constraint | None = None,
    ):
        """take: called with each token as it is read, and its score if asked for; returns whether the
        text ends there. n: tokens at most; below 0 as many as fit. eos: ids that end the text; with
        ignore_eos they are never sampled. progress: called with the number of tokens of the prompt that
        are done, and the total. scores: note each token's, with so many of the most probable ones.
        prompt_scores: called with those of a part of the prompt's tokens, from the second on."""
        self.prompt = [*prompt]  # the caller may go on using the list
        self.take = take
        self.n = n
        self.sampling = sampling
        self.eos = frozenset(eos)
        self.ignores_eos = ignore_eos
        self.mask: Tensor | None = None  # a bit for each token that may be sampled; None if all may
        self.progress = progress
        self.scores = scores
        self.prompt_scores = prompt_scores
        self.constraint = constraint
        self.ids = [*prompt]  # the prompt and what was read of the text
        self.timings = Timings()
        self.finished = False
        self.error: Exception | None = None
        # From when it has a slot
        self.slot: Slot | None = None
        self.limit = 0  # tokens of the text
        self.pos = 0  # positions whose evaluation was launched
        self.placed = 0  # of its tokens, how many the device has
        self.drawn = 0  # tokens of the text whose sampling was launched
        # Seconds since the text was last asked for a token, or since its first one
        self.waited = 0.0
        self.busy = 0.0

    @property
    def starts(self) -> bool:
        """Whether its first token has not been sampled yet."""
        return self.drawn == 0

    @property
    def plain(self) -> bool:
        """Whether nothing but its tokens is asked for, so that proposals may be among them."""
        return self.scores is None and self.constraint is None

    def note_time(self, seconds: float, new: int) -> None:
        """Count the seconds that somebody waited, and the tokens that were then taken."""
        self.waited += seconds
        if not new:
            return
        t = self.timings
        if t.new_tokens == 0:
            t.prompt_seconds += max(self.waited, self.busy)
            self.waited = self.busy = 0.0
            t.steps -= 1
        t.new_tokens += new
        t.steps += new
        t.step_seconds = max(self.waited, self.busy)


class Slot:
    """A run of the cache."""

    def __init__(self, first: int, vocab_size: int, device: torch.device):
        self.first = first  # the place of position 0
        self.sequence: Sequence | None = None
        self.used = 0  # a number that grows with each use
        self._tokens: list[int] = []  # whose keys and values are there
        # The latest prompt that was evaluated, and the logits of its last token: so the same prompt
        # gives the same text when it comes again. Evaluated on its own, that token would be rounded
        # differently
        self.prompt: list[int] = []
        self.prompt_logits = torch.zeros(1, vocab_size, device=device)

    @property
    def tokens(self) -> list[int]:
        """Those whose keys and values are there."""
        s = self.sequence
        return s.ids[: s.pos] if s else self._tokens

    def leave(self) -> None:
        """Be free for another sequence. What was evaluated stays."""
        self._tokens = self.tokens
        self.sequence = None

    def forget(self) -> None:
        self._tokens = []
        self.prompt = []

    def common(self, prompt: list[int]) -> int:
        """How many tokens of a prompt need not be evaluated. The last one's logits are needed, so it
        counts only if the prompt is the latest one."""
        if prompt == self.prompt:
            return len(prompt)
        same = agreeing(self.tokens, prompt)
        return min(same, len(prompt) - 1)


# ---- the loop


class Moment:
    """A moment in the work of a device. On a GPU it comes when everything launched so far is
    done."""

    def __init__(self, device: torch.device):
        self.time = time.perf_counter()
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


class Row(NamedTuple):
    """A sequence's part of a pass that samples: the position of its first row there, and what was
    proposed to follow it."""

    sequence: Sequence
    start: int
    proposals: list[int] = []


@dataclass
class Launched:
    """A pass that has been launched."""

    begun: Moment
    ended: Moment
    sequences: list[Sequence]
    rows: list[Row]  # none if nothing was sampled
    scores: tuple[Tensor, Tensor, Tensor] | None = None  # see Engine._scored
    writes: bool = False  # it evaluated no prompt
    waited: bool = False  # the device was idle while proposals were looked for


class Engine:
    """A model, the cache of its sequences, and the loop that evaluates them."""

    def __init__(self, model: Llama, parallel: int = 1, size: int | None = None):
        """parallel: how many texts may be written at once. size: positions of each, by default the
        model's context."""
        assert 1 <= parallel <= MOST_TEXTS, parallel
        self.model = model
        self.size = size or model.ctx_size
        self.cache = Cache(model, parallel, self.size)
        V = model.config.vocab_size
        self.slots = [Slot(i * self.cache.run, V, model.device) for i in range(parallel)]
        self.proposer: Proposer | None = None
        self.waiting: deque[Sequence] = deque()  # in order of arrival
        self.running: list[Sequence] = []  # those with a slot
        self._launched: deque[Launched] = deque()
        self._prompts_turn = True
        self._uses = 0
        self._count = 0  # of passes
        # What has been captured, and the passes whose memory it uses
        self._logits = torch.zeros(MAX_FEW, V, device=model.device)
        self._passes: dict[tuple[int, int, bool], Pass] = {}
        self._graphs: dict[tuple, torch.cuda.CUDAGraph] = {}

    # Texts

    def check_room(self, count: int) -> None:
        """Raise ContextFull if a text of so many tokens does not fit."""
        if count > self.size:
            holds = f"the context holds {self.size} (ctx_size)"
            raise ContextFull(f"the text has {count} tokens; {holds}")

    def add(self, sequence: Sequence) -> None:
        """Begin a text as soon as there is a slot."""
        self.check_room(len(sequence.prompt))
        self.waiting.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """End a text, if it has begun and is unfinished."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            sequence.finished = True
        elif sequence in self.running:
            self._finish(sequence)

    def wait_for(self, sequence: Sequence, ready: Callable[[], bool]) -> float:
        """Run passes until `ready` or until the text has ended. Returns the seconds that it took.
        Raises what has failed in this text."""
        asked = time.perf_counter()
        while not ready() and not sequence.finished:
            self.step()
        if sequence.error and not ready():
            raise sequence.error
        return time.perf_counter() - asked

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self._launched)

    @torch.inference_mode()
    def step(self) -> None:
        """Launch one pass and read the one before it; if there is nothing to launch, read what is
        left. Prompts and texts that are being written take turns."""
        with self.model.ranks.stopping_together():
            self._admit()
            starting = next((s for s in self.running if s.starts), None)
            writing = [s for s in self.running if 0 < s.drawn < s.limit]
            count = self._count
            if starting and (self._prompts_turn or not writing):
                self._guarded(starting, self._evaluate_prompt, starting, bool(writing))
                self._prompts_turn = False
            elif writing:
                self._write(writing)
                self._prompts_turn = True
            self._read_all_but(int(self.model.uses_graphs and self._count > count))

    def _launch(self, launched: Launched) -> None:
        self._launched.append(launched)
        self._count += 1

    def _guarded(self, sequence: Sequence, do: Callable, *args) -> None:
        """Call `do`; an error is that of the sequence."""
        try:
            do(*args)
        except Exception as error:
            self._fail(sequence, error)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        sequence.error = error
        self._finish(sequence)
        sequence.slot.forget()  # what is there may be wrong

    def _finish(self, sequence: Sequence) -> None:
        sequence.finished = True
        self.running.remove(sequence)
        sequence.slot.leave()

    # Slots

    def _admit(self) -> None:
        """Give a slot to the text that waits longest. Only one text at a time is at its prompt, so that
        the next one finds what they have in common evaluated."""
        while self.waiting and not any(s.starts for s in self.running):
            free = [slot for slot in self.slots if slot.sequence is None]
            if not free:
                return
            self._place(self.waiting[0], free)
            self.running.append(self.waiting.popleft())

    def _place(self, sequence: Sequence, free: list[Slot]) -> None:
        """Put a text into the slot with the longest common beginning, if it needs at least half of what
        is there; otherwise into the one that was used longest ago, with a copy of that beginning."""
        prompt = sequence.prompt
        common = 0
        best = slot = min(free, key=lambda slot: slot.used)
        if sequence.prompt_scores is None:
            best = max(self.slots, key=lambda slot: slot.common(prompt))
            common = best.common(prompt)
            if best in free and 2 * common >= len(best.tokens):
                slot = best
        known = common == len(prompt)
        slot.forget()
        if slot is not best:
            self.cache.copy(best.first, slot.first, common)
            if known:
                slot.prompt_logits.copy_(best.prompt_logits)
        if known:
            slot.prompt = prompt
        self._uses += 1
        slot.used = self._uses
        V = self.model.config.vocab_size
        # A tokenizer without an eos says -1
        never = [i for i in sequence.eos if sequence.ignores_eos and 0 <= i < V]
        sequence.mask = mask_without(never, V) if never else None
        sequence.pos = sequence.placed = common
        room = self.size - len(prompt)
        sequence.limit = min(sequence.n, room) if sequence.n >= 0 else room
        sequence.timings.prompt_tokens = len(prompt) - common
        sequence.slot = slot
        slot.sequence = sequence

    # Prompts

    def _evaluate_prompt(self, sequence: Sequence, others: bool) -> None:
        """Evaluate a chunk of a prompt and, after its last, sample the first token. others: texts are
        being written meanwhile."""
        prompt, slot = sequence.prompt, sequence.slot
        begun = Moment(self.model.device)
        if sequence.pos < len(prompt):
            if sequence.prompt_scores:
                self._score_chunk(sequence)
            else:
                part = prompt[sequence.pos :]
                count = self._chunk(len(part), CHUNK_BESIDE if others else None)
                self._evaluate(slot.first, sequence.pos, part[:count])
                sequence.pos += count
            sequence.placed = sequence.pos
            if sequence.pos == len(prompt):
                slot.prompt = prompt
                slot.prompt_logits.copy_(self._logits[:1])
            if sequence.progress:
                sequence.progress(sequence.pos, len(prompt))
        rows = []
        scores = None
        if sequence.pos == len(prompt):
            if sequence.limit == 0:
                self._finish(sequence)
                return
            rows = [Row(sequence, len(prompt) - 1)]
            scores = self._sample_first(sequence)
            sequence.drawn = 1
            sequence.placed += 1
        moment = Moment(self.model.device)
        self._launch(Launched(begun, moment, [sequence], rows, scores))

    def _chunk(self, left: int, most: int | None) -> int:
        """How many of so many tokens are evaluated at once."""
        chunk = most or PROMPT_CHUNK[self.model.device.type]
        longest = chunk
        if self.model.uses_graphs and not most:
            longest = max(LENGTHS)
        return left if left <= longest else chunk

    def _evaluate(self, first: int, start: int, ids: list[int]) -> None:
        """Evaluate some tokens of a prompt; the last one's logits go to self._logits[0]. On a GPU it is
        a replay of the graph for the next length in LENGTHS, which is captured when it is first
        needed."""
        length = len(ids)
        if self.model.uses_graphs:
            length = next(n for n in LENGTHS if n >= length)
        pass_ = self._pass(length, 1, one_row=True)
        self._put(first + start, ids)
        pass_.take([Segment(first, start, len(ids))])

        def run() -> None:
            # Freed at once. Graphs of all lengths find their memory within this block; otherwise
            # each new longest one would add blocks of its own
            if self.model.uses_graphs:
                most = self.model.prompt_memory(min(max(LENGTHS), self.size))
                torch.empty(most, dtype=torch.uint8, device=self.model.device)
            self.model.forward(pass_, pass_.logits)

        self._run(("prompt", length), pass_, run)

    def _sample_first(self, sequence: Sequence) -> tuple | None:
        """Sample the token after the prompt, from its slot's logits."""
        pass_ = self._pass(1, 1)
        self._prepare(
            pass_, [sequence], [Segment(sequence.slot.first, len(sequence.prompt) - 1, 1)]
        )
        pass_.logits.copy_(sequence.slot.prompt_logits)
        scores = self._sample(pass_, [sequence])
        pass_.expected = [len(sequence.prompt)]
        return scores

    def _score_chunk(self, sequence: Sequence) -> None:
        """Evaluate a chunk of a prompt whose tokens' scores are asked for: few enough that the logits of
        all of them fit into memory."""
        prompt, start = sequence.prompt, sequence.pos
        count = max(1, SCORES_AT_ONCE // self.model.config.vocab_size)
        part = prompt[start : start + count]
        logits = self.forward(part, start, sequence.slot.first)
        self._logits[0] = logits[-1]
        logprobs = logits.log_softmax(-1)
        best = logprobs.topk(min(sequence.scores or 0, logprobs.shape[1]))
        found = []
        for i, token in enumerate(prompt[start + 1 : start + 1 + len(part)]):
            pairs = zip(best.indices[i].tolist(), best.values[i].tolist())
            found.append(Score(float(logprobs[i, token]), [*pairs]))
        sequence.pos += len(part)
        sequence.prompt_scores(found)

    # Texts that are being written

    def _write(self, sequences: list[Sequence]) -> None:
        """Evaluate the last token of each text, and sample the next one."""
        begun = Moment(self.model.device)
        proposals: list[list[int]] = []
        waited = False
        if self.proposer and all(s.plain for s in sequences) and self.proposer.ready():
            waited = self.model.uses_graphs
            self._read_all_but(0)  # the last tokens have to be known
            sequences = [s for s in sequences if not s.finished]
            if not sequences:
                return
            proposals = self._proposals(sequences)
        N = self._segments(len(sequences))
        rows = [Row(s, s.pos) for s in sequences]
        longest = 1
        if any(proposals):
            longest = 1 + max(map(len, proposals))
            rows = [Row(s, s.pos, some) for s, some in zip(sequences, proposals)]
        pass_ = self._pass(N * longest, N)
        expected = pass_.sequences == sequences and pass_.expected == [row.start for row in rows]
        if not (expected and pass_.feeds):
            for s, _, some in rows:
                padding = [0] * (longest - 1 - len(some))
                self._put(s.slot.first + s.placed, [*s.ids[s.placed : s.pos + 1], *some, *padding])
            segments = [Segment(s.slot.first, s.pos, longest) for s in sequences]
            self._prepare(pass_, sequences, segments)
        pass_.expected = []  # unknown, should anything interrupt this
        if all(s.plain for s in sequences):
            self._run(
                ("step", *pass_.place.shape, N, pass_.switches), pass_, partial(self.advance, pass_)
            )
            scores = None
        else:
            self._run(
                ("evaluate", *pass_.place.shape, N),
                pass_,
                partial(self.model.forward, pass_, pass_.logits),
            )
            scores = self._sample(pass_, sequences)
        if pass_.feeds:
            for s in sequences:
                s.pos += 1
                s.drawn += 1
                s.placed = s.pos + 1
            pass_.expected = [s.pos for s in sequences]
        ended = Moment(self.model.device)
        self._launch(Launched(begun, ended, sequences, rows, scores, True, waited))
        if longest > 1:
            self._read_all_but(0)

    def _segments(self, texts: int) -> int:
        """How many segments a pass of so many texts has."""
        if self.model.uses_graphs:
            return next(n for n in TEXTS if n >= texts)
        return texts

    def _draw(self, pass_: Pass) -> None:
        self.model.ops.sample(pass_.logits, pass_)
        pass_.move()

    def _proposals(self, sequences: list[Sequence]) -> list[list[int]]:
        """What may follow each text: as much as one pass of a few tokens takes, and the context has
        room for."""
        count = min(self.proposer.n, MAX_FEW // self._segments(len(sequences)) - 1)
        if count < 1 or any(s.pos + 1 + count >= self.size for s in sequences):
            return [[] for _ in sequences]
        return [self.proposer.propose(s, count) for s in sequences]

    # Passes

    def _pass(self, T: int, N: int, one_row: bool = False) -> Pass:
        key = (T, N, one_row)
        if key not in self._passes:
            self._passes[key] = Pass(self.model, self.cache, T, N, one_row, self._logits)
        return self._passes[key]

    def _put(self, place: int, ids: list[int]) -> None:
        """Put tokens into the cache. An id of -1, which stands for logits that are not finite, becomes
        0."""
        if ids:
            tokens = self.cache.tokens
            known = on_its_way([max(id, 0) for id in ids], torch.int32, tokens.device)
            tokens[place : place + len(ids)].copy_(known, non_blocking=True)

    def _prepare(self, pass_: Pass, sequences: list[Sequence], segments: list[Segment]) -> None:
        """Make these segments a pass's, and the settings of their sequences its sampler's."""
        pass_.take(segments)
        if pass_.sequences != sequences:
            self._settle(pass_, [s.sampling for s in sequences], [s.mask for s in sequences])
            pass_.sequences = [*sequences]

    def _settle(self, pass_: Pass, settings: list[Sampling], masks: list[Tensor | None]) -> None:
        """Give the rows of each segment its settings and the mask of what it may sample."""
        V = self.model.config.vocab_size
        settings = [each for each in settings for _ in range(pass_.longest)]
        all_masks = None
        if any(mask is not None for mask in masks):
            every = mask_without((), V)
            masks = [every if mask is None else mask for mask in masks]
            all_masks = torch.stack([mask for mask in masks for _ in range(pass_.longest)])
        pass_.sampler.set(settings, all_masks)
        pass_.switches = pass_.sampler.switches(V)

    def _sample(self, pass_: Pass, sequences: list[Sequence]) -> tuple | None:
        """Sample from a pass's logits where more than tokens is asked for. Returns the scores."""
        if any(s.constraint for s in sequences):
            self._read_all_but(0)  # what was sampled last decides what may come next
            masks = [s.constraint.mask() if s.constraint else s.mask for s in sequences]
            self._settle(pass_, [s.sampling for s in sequences], masks)
        logprobs = None
        k = max((s.scores for s in sequences if s.scores is not None), default=None)
        if k is not None:
            logprobs = pass_.logits.log_softmax(-1)
        self._run(("sample", *pass_.place.shape, pass_.switches), pass_, partial(self._draw, pass_))
        if logprobs is None:
            return None
        best = logprobs.topk(min(k, logprobs.shape[1]))
        drawn = self.cache.tokens[pass_.place.long()]
        own = logprobs.gather(1, drawn[:, None].long())[:, 0]
        return tuple(t.to("cpu", non_blocking=True) for t in (best.indices, best.values, own))

    def _run(self, key: tuple, pass_: Pass, run: Callable[[], object]) -> None:
        """Run a pass, on a GPU as a CUDA graph, which is captured the first time. All graphs share
        memory, since nothing outlives a replay."""
        if not self.model.uses_graphs:
            run()
            return
        if key not in self._graphs:
            now = pass_.now.clone()
            logits = pass_.logits.clone()

            def reset() -> None:
                pass_.now.copy_(now)
                pass_.logits.copy_(logits)

            pool = next((graph.pool() for graph in self._graphs.values()), None)
            self._graphs[key] = captured(run, self.model.device, reset, pool)
        self._graphs[key].replay()

    # What was sampled

    def _read_all_but(self, ahead: int) -> None:
        """Read all passes but those that may be running."""
        while len(self._launched) > ahead:
            self._read(self._launched.popleft())

    def _read(self, launched: Launched) -> None:
        launched.ended.wait()
        seconds = launched.ended.since(launched.begun)
        for s in launched.sequences:
            s.busy += seconds
        accepted = 0
        for i, (s, start, proposals) in enumerate(launched.rows):
            if s.finished:
                continue
            place = s.slot.first + start + 1
            drawn = self.cache.drawn[place : place + 1 + len(proposals)].tolist()
            count = agreeing(proposals, drawn)
            if s.pos == start:  # with proposals: what counts is known only now
                s.pos += count + 1
                s.placed = s.pos
                s.drawn += count + 1
            accepted += count
            scores = None
            if launched.scores and s.scores is not None:
                indices, values, own = (t[i].tolist() for t in launched.scores)
                scores = Score(own, [*zip(indices, values)][: s.scores])
            for token in drawn[: count + 1]:
                self._guarded(s, self._take, s, token, scores)
                if s.finished:
                    break
        if self.proposer and launched.writes:
            self.proposer.record(launched, accepted, seconds)

    def _take(self, s: Sequence, token: int, score: Score | None) -> None:
        """A token of a text has been read."""
        if token < 0:
            raise RuntimeError(not_finite(self.model))
        s.ids.append(token)
        if s.constraint:
            s.constraint.accept(token)
        ends = s.take(token, score)
        count = len(s.ids) - len(s.prompt)
        if ends or (token in s.eos and not s.ignores_eos) or count >= s.limit:
            self._finish(s)

    # Sequences by hand: for drafts, measurements and perplexity

    def pass_at(self, start: int, count: int, texts: int = 1) -> Pass:
        """A pass of `count` tokens of each of the first sequences, from a position on, with the logits
        of all of them."""
        logits = torch.zeros(texts * count, self.model.config.vocab_size, device=self.model.device)
        pass_ = Pass(self.model, self.cache, texts * count, texts, False, logits)
        pass_.take([Segment(slot.first, start, count) for slot in self.slots[:texts]])
        return pass_

    def advance(self, pass_: Pass) -> None:
        """Evaluate a pass, sample what follows, and move on to that."""
        self.model.forward(pass_, pass_.logits)
        self._draw(pass_)

    @torch.inference_mode()
    def sample_on(
        self,
        ids: list[int],
        known: int,
        first: int,
        n: int,
        sampling: Sampling,
        mask: Tensor | None,
    ) -> list[int]:
        """The n tokens that follow ids, of which the first `known` have been evaluated, in the run that
        begins at the place `first`."""
        self.prefill(ids[known:], known, first)
        pass_ = self._pass(1, 1)
        pass_.take([Segment(first, len(ids) - 1, 1)])
        self._settle(pass_, [sampling], [mask])
        pass_.sequences = []  # its settings are those of no sequence here
        self._run(("sample", 1, pass_.switches), pass_, partial(self._draw, pass_))
        for _ in range(n - 1):
            self._run(("step", 1, 1, pass_.switches), pass_, partial(self.advance, pass_))
        Moment(self.model.device).wait()
        place = first + len(ids)
        return self.cache.drawn[place : place + n].tolist()

    @torch.inference_mode()
    def prefill(self, ids: list[int], start: int = 0, first: int = 0) -> Tensor:
        """Evaluate tokens of a sequence from the position `start` on; `first` is the place of its
        position 0. Returns the logits of the last one, float32 [V]."""
        self.check_room(start + len(ids))
        done = 0
        while done < len(ids):
            count = self._chunk(len(ids) - done, None)
            self._evaluate(first, start + done, ids[done : done + count])
            done += count
        return self._logits[0]

    @torch.inference_mode()
    def forward(self, ids: list[int], start: int = 0, first: int = 0) -> Tensor:
        """The same for T tokens at once. Returns the logits of all of them, float32 [T, V]."""
        self.check_room(start + len(ids))
        V = self.model.config.vocab_size
        logits = torch.empty(len(ids), V, device=self.model.device)
        pass_ = Pass(self.model, self.cache, len(ids), 1, False, logits)
        self._put(first + start, ids)
        pass_.take([Segment(first, start, len(ids))])
        return self.model.forward(pass_, logits)


def generate(
    model: Llama,
    prompt: list[int],
    engine: Engine | None = None,
    n: int = -1,
    sampling: Sampling | None = None,
    eos: Collection[int] | None = None,
    ignore_eos: bool = False,
    timings: Timings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[int]:
    """Evaluate the prompt, then yield new tokens: at most n (no limit if n is negative), until an
    eos (which is yielded) or a full context.

    engine: by default a new one; what the prompt has in common with an earlier text of it is not
    evaluated again. sampling: by default the model's. eos: by default the config's. progress: called
    with the number of tokens of the prompt that are done, and the total. Raises what Llama.check
    does, ContextFull if the prompt is longer than the context, RuntimeError if the logits are not
    finite."""
    model.check(prompt)
    engine = engine or Engine(model)
    new: deque[int] = deque()

    def take(token: int, _) -> bool:
        new.append(token)
        return False

    if eos is None:
        eos = model.config.eos_ids
    sequence = Sequence(prompt, take, n, sampling or model.sampling, eos, ignore_eos, progress)
    sequence.timings = timings or sequence.timings
    engine.add(sequence)
    try:
        while True:
            seconds = engine.wait_for(sequence, lambda: bool(new))
            sequence.note_time(seconds, int(bool(new)))
            if not new:
                return
            yield new.popleft()
    finally:
        engine.leave(sequence)
