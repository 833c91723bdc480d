"""Several sequences at once: which of their tokens the next pass evaluates, and what becomes of what it
samples.

    Sequence   one text: its prompt, its settings, its limit, who takes its tokens
    Slot       a sequence's place in the cache, which outlives it: what a later prompt has in common
               with it is not evaluated again
    Engine     the loop: admit what waits, compose the next pass, launch it, read the one before

A pass evaluates a chunk of one prompt, or the last token of every text that is being written, each with
proposals for what may follow it.

On a GPU a pass is a replay of a CUDA graph, and the host is one pass ahead: while it reads what one pass
has sampled, the next is running. Tokens and positions stay on the device meanwhile. So a text whose end
the host has not seen yet may take part in one more pass, for which its slot has room.

With several texts, rounding depends on how many tokens a pass has: the same seed gives the same text
only when the same others are written with it. Everything else is as if each text were alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from model import Llama, not_finite
from passes import MOST_TEXTS, Moment, Pass, Passes, Segment, Wish
from products import MAX_FEW
from sampling import Sampling, mask_without
from speculation.proposals import Proposer, agreeing
from texts import Score, Timings, check_prompt, check_room

if TYPE_CHECKING:
    from constraints import Constraint
    from speculation.heads import Chain

# Tokens of a prompt at once, while other texts wait for their next one: for them each chunk is a pause
CHUNK_BESIDE = {"cpu": 128, "cuda": 512}
SCORES_AT_ONCE = 1 << 22  # logits of a prompt's tokens that are in memory together


# ---- sequences


@dataclass(eq=False, repr=False)
class Sequence:
    """One text: a prompt, and how it goes on."""

    prompt: list[int]
    # Called with each token as it is read, and its score if asked for; returns whether the text ends there
    take: Callable[[int, Score | None], bool]
    n: int = -1  # tokens at most; below 0 as many as fit
    sampling: Sampling = Sampling()
    eos: Collection[int] = ()  # ids that end the text
    ignore_eos: bool = False  # these are never sampled, and the text goes on
    # Called with the number of tokens of the prompt that are done, and the total
    progress: Callable[[int, int], None] | None = None
    scores: int | None = None  # note each token's, with that many of the most probable ones
    # Called with those of a part of the prompt's tokens, from the second on
    prompt_scores: Callable[[list[Score]], None] | None = None
    bias: Mapping[int, float] | None = None  # added to the logits of these ids
    constraint: Constraint | None = None  # says which tokens may come next

    def __post_init__(self) -> None:
        self.prompt = [*self.prompt]  # the caller may go on using the list
        self.eos = frozenset(self.eos)
        self.mask: Tensor | None = None  # a bit for each token that may be sampled; None if all may
        self.ids = [*self.prompt]  # the prompt and what was read of the text
        self.timings = Timings()
        self.finished = False
        self.error: Exception | None = None
        # From when it has a slot
        self.slot: Slot | None = None
        self.limit = 0  # tokens of the text
        self.pos = 0  # positions whose evaluation was launched
        self.placed = 0  # of its tokens, how many the device has
        self.drawn = 0  # tokens of the text whose sampling was launched
        # Seconds up to its first token, afterwards since that: in which somebody waited for it, and
        # which its passes took
        self.waited = 0.0
        self.busy = 0.0

    @property
    def starts(self) -> bool:
        """Whether its first token has not been sampled yet."""
        return self.drawn == 0

    @property
    def wish(self) -> Wish:
        """How its next token is chosen, but for the constraint."""
        return Wish(self.sampling, self.mask, self.bias, len(self.prompt))

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
        self.used = 0  # the later the slot was last given to a text, the larger
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
        """Become free for another sequence. What was evaluated stays."""
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


class Row(NamedTuple):
    """A sequence's part of a pass that samples: the position of its first row there, and what was
    proposed to follow it. Where the device has proposed, only the device knows these."""

    sequence: Sequence
    start: int | None
    proposals: list[int] = []


@dataclass
class Launched:
    """A pass that has been launched."""

    begun: Moment
    ended: Moment
    sequences: list[Sequence]
    rows: list[Row]  # none if nothing was sampled
    # of each row: the most probable tokens, their log-probabilities, and that of the sampled one
    scores: tuple[Tensor, Tensor, Tensor] | None = None
    writes: bool = False  # it went on with texts, and evaluated no prompt
    waited: bool = False  # the device was idle while proposals were looked for
    # What the device proposed to follow each row, and what it drew there: int32 [2, texts, rows]
    verified: Tensor | None = None


class Engine:
    """A model, the cache of its sequences, and the loop that evaluates them."""

    def __init__(self, model: Llama, parallel: int = 1, size: int | None = None):
        """parallel: how many texts may be written at once. size: positions of each, by default the
        model's context."""
        assert 1 <= parallel <= MOST_TEXTS, parallel
        self.model = model
        self.passes = Passes(model, parallel, size)
        self.size = self.passes.size
        self.cache = self.passes.cache
        V = model.config.vocab_size
        self.slots = [Slot(i * self.cache.run, V, model.device) for i in range(parallel)]
        self.proposer: Proposer | None = None
        self._chain: Chain | None = None  # in which the device goes on with texts by itself
        self.waiting: deque[Sequence] = deque()  # in order of arrival
        self.running: list[Sequence] = []  # those with a slot
        self._launched: deque[Launched] = deque()
        self._prompts_turn = True
        self._uses = 0
        self._lock = RLock()  # several threads may ask for texts

    # Texts

    def add(self, sequence: Sequence) -> None:
        """Begin a text as soon as there is a slot."""
        check_room(len(sequence.prompt), self.size)
        with self._lock:
            self.waiting.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """End a text, if it has begun and is unfinished."""
        with self._lock:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
                sequence.finished = True
            elif sequence in self.running:
                self._finish(sequence)

    def wait_for(self, sequence: Sequence, ready: Callable[[], bool]) -> float:
        """Run passes until `ready` or until the text has ended. Returns the seconds that it took.
        Raises the error that ended this text, if one did."""
        asked = time.perf_counter()
        while not ready() and not sequence.finished:
            self.step()
        if sequence.error and not ready():
            raise sequence.error
        return time.perf_counter() - asked

    @property
    def has_room(self) -> bool:
        """Whether a further text would not have to wait for a slot."""
        return len(self.waiting) + len(self.running) < len(self.slots)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self._launched)

    @torch.inference_mode()
    def step(self) -> None:
        """Launch one pass and read the one before it; if there is nothing to launch, read what is
        left. Prompts and texts that are being written take turns."""
        with self._lock, self.model.ranks.stopping_together():
            self._admit()
            starting = next((s for s in self.running if s.starts), None)
            writing = [s for s in self.running if 0 < s.drawn < s.limit]
            if starting and (self._prompts_turn or not writing):
                self._guarded(starting, self._evaluate_prompt, starting, bool(writing))
                self._prompts_turn = False
            elif writing:
                self._write(writing)
                self._prompts_turn = True
            self._read_all_but(int(self.model.uses_graphs and bool(starting or writing)))

    def _guarded(self, sequence: Sequence, do: Callable, *args) -> None:
        """Call `do`; an error that it raises ends the sequence, and no other."""
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
        """Put a text into the slot with the longest common beginning, or into the one that was used
        longest ago, with a copy of that beginning: where fewer tokens are lost."""
        prompt = sequence.prompt
        common = 0
        best = slot = min(free, key=lambda slot: slot.used)
        if sequence.prompt_scores is None:
            # of equals one that is free, since nothing is copied then
            best = max(self.slots, key=lambda s: (s.common(prompt), s.sequence is None))
            common = best.common(prompt)
            if best in free and len(best.tokens) - common <= len(slot.tokens):
                slot = best
        known = common == len(prompt)
        slot.forget()
        if slot is not best:
            self.cache.copy(best.first, slot.first, common)
            if known:
                slot.prompt_logits.copy_(best.prompt_logits)
        if self.proposer:
            common = self.proposer.reuse(best.first, slot.first, common)
        if known:
            slot.prompt = prompt
        self._uses += 1
        slot.used = self._uses
        V = self.model.config.vocab_size
        # A tokenizer without an eos says -1
        never = [i for i in sequence.eos if sequence.ignore_eos and 0 <= i < V]
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
                most = CHUNK_BESIDE[self.model.device.type] if others else None
                count = self.passes.chunk(len(part), most)
                self.passes.evaluate_prompt(part[:count], sequence.pos, slot.first)
                sequence.pos += count
            sequence.placed = sequence.pos
            if sequence.pos == len(prompt) and slot.prompt != prompt:
                slot.prompt = prompt
                slot.prompt_logits.copy_(self.passes.logits[:1])
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
        self._launched.append(Launched(begun, moment, [sequence], rows, scores))

    def _sample_first(self, sequence: Sequence) -> tuple | None:
        """Sample the token after the prompt, from its slot's logits."""
        pass_ = self.passes.get(1, 1)
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
        logits = self.passes.forward(part, start, sequence.slot.first)
        self.passes.logits[0] = logits[-1]
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
        proposer = self.proposer
        proposes = bool(proposer) and any(s.plain for s in sequences) and proposer.ready()
        if proposes and (chain := self._chain_of(sequences)):
            self._verify(sequences, chain, begun)
            return
        proposes = proposes and not proposer.only_chains
        if proposes or self._chain:
            self._chain = None
            self._read_all_but(0)  # the last tokens have to be known
            sequences = [s for s in sequences if not s.finished]
            if not sequences:
                return
        proposals = self._proposals(sequences) if proposes else [[] for _ in sequences]
        rows = [Row(s, s.pos, some) for s, some in zip(sequences, proposals)]
        pass_ = self._pass_of(sequences, rows)
        pass_.expected = []  # unknown, should anything interrupt this
        if all(s.plain for s in sequences):
            self.passes.step(pass_)
            scores = None
        else:
            self.passes.evaluate(pass_)
            scores = self._sample(pass_, sequences)
        if pass_.feeds:
            for s in sequences:
                s.pos += 1
                s.drawn += 1
                s.placed = s.pos + 1
            pass_.expected = [s.pos for s in sequences]
        ended = Moment(self.model.device)
        waited = proposes and self.model.uses_graphs
        self._launched.append(Launched(begun, ended, sequences, rows, scores, True, waited))
        if any(proposals):
            self._read_all_but(0)

    def _pass_of(self, sequences: list[Sequence], rows: list[Row]) -> Pass:
        """The pass of these rows with their proposals, once the device knows what it evaluates: as it
        does by itself where the same texts go on by a token each."""
        longest = 1 + max(len(row.proposals) for row in rows)
        N = self.passes.segments(len(sequences))
        pass_ = self.passes.get(N * longest, N)
        expected = pass_.sequences == sequences and pass_.expected == [row.start for row in rows]
        if expected and pass_.feeds:
            return pass_
        for s, _, some in rows:
            padding = [0] * (longest - 1 - len(some))
            self.passes.write_tokens(
                s.slot.first + s.placed, [*s.ids[s.placed : s.pos + 1], *some, *padding]
            )
        segments = [Segment(s.slot.first, s.pos, longest) for s in sequences]
        self._prepare(pass_, sequences, segments)
        return pass_

    def _chain_of(self, sequences: list[Sequence]) -> Chain | None:
        """The chain in which the device itself proposes for these texts. Returns None if the proposer
        has none, if the host has a say in what comes next, or where the context may have no room: what
        the host knows of a text may be a pass behind, and the device is to be another one ahead."""
        count = self._proposals_each(sequences)
        longest = max(s.pos for s in sequences)
        if (
            count < 1
            or longest + 3 * (1 + count) > self.size
            or not all(s.plain for s in sequences)
        ):
            return None
        return self.proposer.chain(self.passes.segments(len(sequences)), count)

    def _verify(self, sequences: list[Sequence], chain: Chain, begun: Moment) -> None:
        """Evaluate the last token of each text with what a head has proposed to follow it, and let the
        head propose again. As long as the texts stay the same, the device does not wait for the host,
        which is a pass behind. What a head lacks at the beginning is part of what the pass costs."""
        goes_on = chain is self._chain and chain.sequences == sequences
        self._chain = None  # should anything interrupt this
        if not goes_on:
            self._read_all_but(0)
            if any(s.finished for s in sequences):
                return
            self._begin(sequences, chain)
        self.passes.run(("verify", chain.switches), chain, chain.verify)
        verified = chain.found.to("cpu", non_blocking=True, copy=True)
        ended = Moment(self.model.device)
        waited = self.model.uses_graphs and not goes_on
        rows = [Row(s, None) for s in sequences]
        self._launched.append(Launched(begun, ended, sequences, rows, None, True, waited, verified))
        self._chain = chain

    def _begin(self, sequences: list[Sequence], chain: Chain) -> None:
        """Let a head propose what follows these texts, once it has evaluated what it lacks of them; for
        that, the model has to do the same."""
        for s in sequences:
            first = s.slot.first
            known = self.proposer.evaluated(first)
            if known < s.pos:
                self.passes.prefill(s.ids[known : s.pos], known, first)
            self.passes.write_tokens(first + s.placed, s.ids[s.placed : s.pos + 1])
        chain.take(sequences)
        for pass_, wishes in chain.sampling:
            self.passes.set_sampling(pass_, wishes)
        self.passes.run(("propose", chain.switches), chain, chain.propose)

    def _proposals_each(self, sequences: list[Sequence]) -> int:
        """How many proposals each of these texts may have: as many as a pass of a few tokens takes."""
        return min(self.proposer.n, MAX_FEW // self.passes.segments(len(sequences)) - 1)

    def _proposals(self, sequences: list[Sequence]) -> list[list[int]]:
        """What may follow each text, as far as the context has room for it: nothing if more than tokens
        is asked for."""
        count = self._proposals_each(sequences)
        if count < 1 or any(s.pos + 1 + count >= self.size for s in sequences):
            return [[] for _ in sequences]
        return [self.proposer.propose(s, count) if s.plain else [] for s in sequences]

    def _prepare(self, pass_: Pass, sequences: list[Sequence], segments: list[Segment]) -> None:
        """Make these segments a pass's, and the settings of their sequences its sampler's."""
        pass_.take(segments)
        if pass_.sequences != sequences:
            self.passes.set_sampling(pass_, [s.wish for s in sequences])
            pass_.sequences = [*sequences]

    def _sample(self, pass_: Pass, sequences: list[Sequence]) -> tuple | None:
        """Sample from a pass's logits where more than tokens is asked for. Returns the scores."""
        if any(s.constraint for s in sequences):
            self._read_all_but(0)  # what was sampled last decides what may come next
            self.passes.restrict(pass_, [self._mask(s) for s in sequences])
        logprobs = None
        k = max((s.scores for s in sequences if s.scores is not None), default=None)
        if k is not None:
            logprobs = pass_.logits[:: pass_.longest].log_softmax(-1)
        self.passes.sample(pass_)
        if logprobs is None:
            return None
        best = logprobs.topk(min(k, logprobs.shape[1]))
        own = logprobs.gather(1, self._drawn(pass_)[:, None].long())[:, 0]
        return tuple(t.to("cpu", non_blocking=True) for t in (best.indices, best.values, own))

    def _drawn(self, pass_: Pass) -> Tensor:
        """What was drawn to follow the first row of each text, on the device."""
        if pass_.feeds:
            return self.cache.tokens[pass_.place.long()]
        Moment(self.model.device).wait()  # beside proposals only the host has it
        places = pass_.place[:: pass_.longest].long() + 1
        return self.cache.drawn[places.cpu()].clamp(min=0).to(self.model.device)

    def _mask(self, s: Sequence) -> Tensor | None:
        """What the next token of a text may be. If its constraint fails, the text ends."""
        if not s.constraint or s.finished:
            return s.mask
        try:
            mask = s.constraint.mask()
        except Exception as error:
            self._fail(s, error)
            return s.mask
        if s.mask is not None and (both := mask & s.mask).any():
            return both
        return mask

    # What was sampled

    def _read_all_but(self, ahead: int) -> None:
        """Read all passes but those that may be running."""
        while len(self._launched) > ahead:
            self._read(self._launched[0])
            self._launched.popleft()

    def _read(self, launched: Launched) -> None:
        launched.ended.wait()
        seconds = launched.ended.since(launched.begun)
        for s in launched.sequences:
            s.busy += seconds
        texts = proposed = accepted = 0
        for i, (s, start, proposals) in enumerate(launched.rows):
            if s.finished:
                continue
            if launched.verified is None:
                place = s.slot.first + start + 1
                drawn = self.cache.drawn[place : place + 1 + len(proposals)].tolist()
            else:
                (*proposals, _), drawn = launched.verified[:, i].tolist()
                if start is None:
                    start = s.pos
                    launched.rows[i] = Row(s, start)  # should Ctrl-C come
            count = agreeing(proposals, drawn)
            if s.pos == start:  # with proposals: what counts is known only now
                s.pos += count + 1
                s.placed = s.pos
                s.drawn += count + 1
                if launched.verified is not None:
                    self.proposer.note(s.slot.first, s.pos)
            scores = None
            if launched.scores and s.scores is not None:
                indices, values, own = (t[i].tolist() for t in launched.scores)
                scores = Score(own, [*zip(indices, values)][: s.scores])
            # Some have been taken if Ctrl-C came meanwhile
            for token in drawn[len(s.ids) - start - 1 : count + 1]:
                self._guarded(s, self._take, s, token, scores)
                if s.finished:
                    break
            s.timings.passes += launched.writes
            s.timings.proposed += len(proposals)
            s.timings.accepted += count
            texts += 1
            proposed += len(proposals)
            accepted += count
        if self.proposer and launched.writes and texts:
            captured = launched.ended.has_captured(launched.begun)
            self.proposer.record(texts, proposed, accepted, seconds, launched.waited, captured)

    def _take(self, s: Sequence, token: int, score: Score | None) -> None:
        """A token of a text has been read."""
        if token < 0:
            raise RuntimeError(not_finite(self.model))
        s.ids.append(token)
        if s.constraint:
            s.constraint.accept(token)
        ends = s.take(token, score)
        count = len(s.ids) - len(s.prompt)
        if ends or (token in s.eos and not s.ignore_eos) or count >= s.limit:
            self._finish(s)


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
    with the number of tokens of the prompt that are done, and the total. Raises what check_prompt
    does, ContextFull if the prompt is longer than the context, RuntimeError if the logits are not
    finite."""
    check_prompt(prompt, model.config.vocab_size)
    engine = engine or Engine(model)
    new: deque[int] = deque()

    def take(token: int, _) -> bool:
        new.append(token)
        return False

    if eos is None:
        eos = model.config.eos_ids
    sequence = Sequence(prompt, take, n, sampling or model.sampling, eos, ignore_eos, progress)
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
        if timings is not None:
            timings.add(sequence.timings)
