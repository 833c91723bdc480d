"""Mutation testing: small wrong changes to the program, each of which the tests must notice.

    python dev/mutate.py                   # all of them; three to eleven minutes of CPU time
    python dev/mutate.py sampling.py       # those of one file
    python dev/mutate.py --check           # only whether each one's text is in the program

Each change is made in a copy of the program, where the tests whose names match the words beside it
are then run, up to the first that fails; the words name the quickest tests that notice. First they
are run without any change. Each run is a fork of a process that has imported what takes long, and
there are as many at a time as cores. Kernels run in Triton's interpreter, also beside a GPU. What the
interpreter does not run has no mutants: CUDA graphs, launches, the exchange between GPUs and
cards/hopper.py are judged by the tests on such a card."""

import argparse
import importlib
import multiprocessing
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 900  # for the tests of one change, which take up to a minute
FORKS = multiprocessing.get_context("fork")
TEST_FILES = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("*/test_*.py"))
LARGE_PACKAGES = (  # whose import takes most of the time
    "torch", "transformers.models.llama.modeling_llama", "gguf", "hypothesis", "matplotlib.pyplot",
)  # fmt: skip


class Mutant(NamedTuple):
    file: str
    old: str  # occurs once in the file
    new: str
    words: str  # of the names of tests that may notice, as pytest -k takes them


MUTANTS = [
    Mutant(
        "products.py",
        "tl.sum(y * y) / C + eps)",
        "tl.sum(y * y) / C)",
        "op_equals and bfloat16 and rmsnorm",
    ),
    Mutant(
        "bits/stream.py",
        "x_part[1], FORMAT.scales_of) * x_part[2]",
        "x_part[1], FORMAT.scales_of)",
        "products_with_4_bit",
    ),
    Mutant(
        "kernels.py",
        "return even * cos - odd * sin,",
        "return even * cos + odd * sin,",
        "op_equals and bfloat16 and qkv_rope",
    ),
    Mutant(
        "products.py",
        "return ordered_rows(self.x, format, self.norm, self.eps)",
        "return self.x",
        "products_do_not_depend",
    ),
    Mutant(
        "products.py",
        "(acc, 0)\n    if FORMAT.gain is not None:",
        "(acc, 0)\n    if False:",
        "products_do_not_depend",
    ),
    Mutant(
        "products.py",
        "if bias is not None:\n        acc += ",
        "if False:\n        acc += ",
        "many_tokens and q4_0",
    ),
    Mutant(
        "formats.py",
        "begin = tl.sum(tl.where(before, count, 0), 1) + first",
        "begin = tl.sum(tl.where(before, count, 0), 1)",
        "numbers_of_slots and e4m3",
    ),
    Mutant(
        "cards/cpu.py",
        "torch.bfloat16 and multiplies_bf16() else",
        "torch.bfloat16 else",
        "without_bf16",
    ),
    Mutant(
        "cards/cpu.py",
        'if any(f is not w.format and f.for_matrix("output") is w.format for f in among):',
        "if False:",
        "model_in_a_format and int4",
    ),
    Mutant(
        "attention.py",
        "[None, :] <= start_pos + offs_m",
        "[None, :] < start_pos + offs_m",
        "op_equals and bfloat16 and attention",
    ),
    Mutant(
        "attention.py",
        "n + offs_n < end, scores, float",
        "n + offs_n <= end, scores, float",
        "attention_does_not_depend",
    ),
    Mutant(
        "attention.py",
        "row_sum * rescale + tl.sum(p, 1)",
        "row_sum + tl.sum(p, 1)",
        "attention_does_not_depend",
    ),
    Mutant(
        "attention.py",
        "(start_pos + row + 1) // BLOCK_N",
        "(start_pos + row + 2) // BLOCK_N",
        "attention_of_a_prompt and 62 and False",
    ),
    Mutant(
        "launch.py",
        "group = segment * tl.num_programs(0) + pid",
        "group = pid",
        "attention_of_several and False",
    ),
    Mutant(
        "attention.py",
        "tl.where(offs_m[:, None] < count,",
        "tl.where(offs_m[:, None] <= count,",
        "attention_of_padding and False",
    ),
    Mutant(
        "launch.py",
        "tl.where(last, T - begin, count)",
        "count",
        "attention_of_padding and False",
    ),
    Mutant(
        "launch.py",
        "        tl.store(arrived, 0)\n",
        "        pass\n",
        "attention_does_not_depend",
    ),
    Mutant(
        "cards/sizes.py",
        "max((k for k in table if k <= key), default=min(table))",
        "min(table)",
        "nearest",
    ),
    Mutant(
        "fp8.py",
        ".clamp(-largest, largest)",
        ".clamp(-largest, 2 * largest)",
        "codes_decode_and_encode",
    ),
    Mutant(
        "fp8.py",
        "magnitudes.amax() >= self.not_finite",
        "magnitudes.amax() > self.not_finite",
        "codes_decode_and_encode",
    ),
    Mutant(
        "bits/int4.py",
        'return E4M3 if name == "output" else self',
        "return self",
        "model_in_a_format and int4",
    ),
    Mutant("bits/int4.py", "by_4 * -zero", "by_4 * zero", "products_with_4_bit"),
    Mutant(
        "bits/groups.py",
        "load_groups(w[1 + i], start, k, left, COLUMNS, EACH, FORMAT.groups[i])",
        "load_groups(w[1 + i], start, k, left, COLUMNS, EACH, 32)",
        "safetensors_formats",
    ),
    Mutant("sampling.py", "(back < window)", "(back <= window)", "penalty_looks_back"),
    Mutant(
        "sampling.py", '(l != l) | (tl.abs(l) == float("inf"))', "(l != l)", "logits_not_finite"
    ),
    Mutant("launch.py", "bits ^ ((bits >> 31) & 0x7FFFFFFF)", "bits", "scores_are_negative"),
    Mutant(
        "sampling.py",
        "tl.where(noise > 0, _gumbel",
        "tl.where(noise >= 0, _gumbel",
        "several_texts",
    ),
    Mutant("sampling.py", "tl.minimum(best, FORBIDDEN / 2)", "best * 0 + FORBIDDEN", "leave_few"),
    Mutant("sampling.py", "torch.where(top_p <= 1,", "torch.where(top_p <= 2,", "several_texts"),
    Mutant("sampling.py", "tl.load(rows + row)", "row", "several_texts"),
    Mutant("sampling.py", "2.0 ** (53 - V.bit_length())", "8.0", "sampling_equals"),
    Mutant("sampling.py", ".masked_fill(ranked < floor, -math.inf)", "", "lowest_logit"),
    Mutant(
        "sampling.py",
        "if count > CHUNK:\n            l =",
        "if count < 0:\n            l =",
        "sampling_equals and many",
    ),
    Mutant(
        "sampling.py", "tl.atomic_xchg(counts + row, 0)", "tl.load(counts + row)", "other_sampling"
    ),
    Mutant(
        "sampling.py",
        "tl.maximum(winner, _draw(chunk, chunk_ids, *args))",
        "_draw(chunk, chunk_ids, *args)",
        "sampling_equals",
    ),
    Mutant(
        "sampling.py",
        "tl.where(seen > 0, seen / penalty, seen * penalty)",
        "seen / penalty",
        "penalty_looks_back",
    ),
    Mutant(
        "engine.py",
        "return min(same, len(prompt) - 1)",
        "return same",
        "asked_again",
    ),
    Mutant(
        "engine.py",
        "if best in free and len(best.tokens) - common <= len(slot.tokens):",
        "if best in free:",
        "have_in_common",
    ),
    Mutant(
        "engine.py",
        "                slot.prompt_logits.copy_(best.prompt_logits)\n",
        "                pass\n",
        "choices_of_one_prompt and CPU",
    ),
    Mutant(
        "engine.py",
        "copy(best.first, slot.first, common)",
        "copy(best.first, slot.first, common - 1)",
        "have_in_common",
    ),
    Mutant(
        "engine.py",
        "        sequence.slot.forget()  # what is there may be wrong\n",
        "",
        "not_finite_ends_alone and CPU",
    ),
    Mutant(
        "engine.py",
        "        slot.forget()\n        if slot is not best",
        "        if slot is not best",
        "admission_that_is",
    ),
    Mutant(
        "engine.py",
        "            if s.finished:\n                continue\n",
        "",
        "one_pass_ahead",
    ),
    Mutant(
        "engine.py",
        "MAX_FEW // self.passes.segments(len(sequences)) - 1",
        "MAX_FEW // len(sequences) - 1",
        "draft_of_several",
    ),
    Mutant(
        "engine.py",
        "if count < 1 or any(",
        "if count < 1 or False and any(",
        "draft_of_several",
    ),
    Mutant(
        "engine.py",
        "self._read(self._launched[0])\n            self._launched.popleft()\n",
        "self._read(self._launched.popleft())\n",
        "any_company",
    ),
    Mutant(
        "engine.py",
        "while self.waiting and not any(s.starts for s in self.running):",
        "while self.waiting:",
        "choices_of_one_prompt and CPU",
    ),
    Mutant(
        "engine.py",
        "self._place(self.waiting[0], free)\n            self.running.append(self.waiting.popleft())",
        "self._place(self.waiting[-1], free)\n            self.running.append(self.waiting.pop())",
        "order_of_arrival and CPU",
    ),
    Mutant(
        "engine.py",
        "CHUNK_BESIDE[self.model.device.type] if others else None",
        "None",
        "take_turns and CPU",
    ),
    Mutant(
        "engine.py",
        "                self._prompts_turn = False\n",
        "                self._prompts_turn = True\n",
        "take_turns and CPU",
    ),
    Mutant(
        "engine.py",
        "                slot.prompt = prompt\n                slot.prompt_logits",
        "                slot.prompt_logits",
        "asked_again",
    ),
    Mutant(
        "engine.py",
        "[*s.ids[s.placed : s.pos + 1], *some, *padding]",
        "[*some, *padding]",
        "any_company",
    ),
    Mutant(
        "engine.py",
        "pass_.sequences == sequences and pass_.expected == [row.start for row in rows]",
        "pass_.sequences == sequences",
        "any_company",
    ),
    Mutant(
        "engine.py",
        "if sequence.ignore_eos and 0 <= i < V]",
        "if sequence.ignore_eos]",
        "never_sampled",
    ),
    Mutant(
        "engine.py",
        "prompt_tokens = len(prompt) - common",
        "prompt_tokens = len(prompt)",
        "have_in_common",
    ),
    Mutant(
        "engine.py",
        "[*zip(indices, values)][: s.scores]",
        "[*zip(indices, values)]",
        "texts_in_any",
    ),
    Mutant(
        "engine.py",
        "float(logprobs[i, token])",
        "float(logprobs.exp()[i, token])",
        "scores_of_a_prompt",
    ),
    Mutant(
        "engine.py",
        "prompt[start + 1 : start + 1 + len(part)]",
        "prompt[1 : 1 + len(part)]",
        "scores_of_a_prompt",
    ),
    Mutant(
        "engine.py",
        "[s for s in self.running if 0 < s.drawn < s.limit]",
        "[s for s in self.running if 0 < s.drawn]",
        "one_pass_ahead",
    ),
    Mutant(
        "passes.py",
        "moves += [0, int(self.feeds), 0, 0]",
        "moves += [0, 0, 0, 0]",
        "any_company",
    ),
    Mutant(
        "passes.py",
        "[int(self.feeds)] * real + [0] * (T - real)",
        "[int(self.feeds)] * T",
        "padding_stays",
    ),
    Mutant(
        "passes.py",
        "[self.spare + position for",
        "[position for",
        "keys_of_one_text and torch and graphs",
    ),
    Mutant(
        "passes.py",
        "self.rows.fill_(real - 1)",
        "self.rows.fill_(T - 1)",
        "padded_prompts",
    ),
    Mutant(
        "passes.py",
        "left if left <= longest else chunk",
        "min(left, chunk)",
        "long_prompts_are_graphs",
    ),
    Mutant(
        "passes.py",
        "        self.run = size + AHEAD ",
        "        self.run = size - 1 ",
        "context_to_its_last",
    ),
    Mutant(
        "loading/rope.py",
        "(1 - share + share / factor)",
        "(0 * share + 1 / factor)",
        "places_of_rope",
    ),
    Mutant("loading/hugging_face.py", " or ids_in(f, name, vocab_size, notes)", "", "config_eos"),
    Mutant("loading/rope.py", "older | newer | last", "last | older | newer", "places_of_rope"),
    Mutant(
        "loading/layouts.py",
        "or not equal(one, other)",
        "or equal(one, other)",
        "tied_embeddings",
    ),
    Mutant(
        "loading/layouts.py",
        "if c.tie_embeddings and not layout.format:",
        "if c.tie_embeddings:",
        "spoiled_checkpoint and second",
    ),
    Mutant(
        "loading/layouts.py",
        "if named.get(t.name, t.file) == t.file",
        "",
        "checkpoints_equal and twice",
    ),
    Mutant(
        "loading/place.py",
        "max(running, to_encode)",
        "running",
        "memory_of_7b",
    ),
    Mutant(
        "loading/place.py",
        "decoded=2 * layer * dtype.itemsize",
        "decoded=layer * dtype.itemsize",
        "memory_of_7b",
    ),
    Mutant(
        "loading/hugging_face.py",
        'f.number("rms_norm_eps", 0, 1, 1e-6',
        'f.number("rms_norm_eps", 0, 1, 1e-5',
        "config_fields_and_defaults",
    ),
    Mutant(
        "loading/place.py",
        "if hidden or not Path(sign).exists():",
        "if not Path(sign).exists():",
        "gpu_that_torch_does_not_see",
    ),
    Mutant(
        "talk/cli.py",
        'note(f"note: {one_line(str(message))}")',
        'note(f"{one_line(str(message))}")',
        "gets_one_line",
    ),
    Mutant(
        "loading/place.py",
        "    ctx_size = ctx_size or config.max_seq_len",
        "    ctx_size = ctx_size or min(config.max_seq_len, 4096)",
        "size_of_the_context",
    ),
    Mutant(
        "loading/reading.py",
        "if tensor.stamp != stamps[tensor.file]:",
        "if False:",
        "that_change",
    ),
    Mutant(
        "loading/tensors.py",
        "at = stored.expert * sum(",
        "at = 0 * sum(",
        "checkpoints_equal and moe and safetensors",
    ),
    Mutant(
        "loading/reading.py",
        "most // (each * unit)) * unit",
        "most // each)",
        "checkpoints_equal and moe and safetensors",
    ),
    Mutant(
        "loading/reading.py",
        "yield [range(i, i + 1), *piece]",
        "yield [range(1), *piece]",
        "gguf_models and mixtral",
    ),
    Mutant(
        "loading/tensors.py",
        "stored.step * own.start - some.start",
        "stored.step * own.start",
        "checkpoints_equal and moe and safetensors",
    ),
    Mutant(
        "loading/tensors.py",
        "start += rows_in(piece)",
        "start += 1",
        "checkpoints_equal and moe and safetensors",
    ),
    Mutant(
        "loading/torchfile.py", "> 2 * stat.st_size", "> 2**60", "spoiled_checkpoint and storage"
    ),
    Mutant(
        "loading/torchfile.py",
        "if found.end > stat.st_size:",
        "if False:",
        "spoiled_checkpoint and elements",
    ),
    Mutant(
        "loading/torchfile.py", "filename.lower()", "filename", "spoiled_checkpoint and capitals"
    ),
    Mutant("loading/torchfile.py", "value.is_neg()", "False", "spoiled_checkpoint and negated"),
    Mutant("formats.py", "weights.aminmax()).float()", "weights.aminmax())", "infinite_weight"),
    Mutant(
        "loading/tensors.py",
        "(-1, 2, self.head_dim // 2,",
        "(-1, self.head_dim // 2, 2,",
        "checkpoints_equal and bin",
    ),
    Mutant(
        "loading/meta.py",
        "if len(shape) == 1:  # every",
        "if False:  # every",
        "checkpoints_equal and meta",
    ),
    Mutant(
        "loading/quantised.py",
        "[0, 4, 1, 5, 2, 6, 3, 7]",
        "[0, 2, 4, 6, 1, 3, 5, 7]",
        "safetensors_equal and AWQ",
    ),
    Mutant(
        "loading/quantised.py",
        "elif not version_2:",
        "elif version_2:",
        "safetensors_equal and GPTQ",
    ),
    Mutant(
        "prompts.py", "strip_space = prompt.leaves_space", "strip_space = False", "serve_messages"
    ),
    Mutant(
        "prompts.py",
        "encode(text, parse_special=True) or first",
        "encode(text) or first",
        "a_prompt_with_a_bos",
    ),
    Mutant(
        "prompts.py",
        "if answer.lacks_text:",
        'if answer.ended_by == "stop":',
        "cut_answer",
    ),
    Mutant(
        "tokenizer.py",
        "n + 1 if is_whole else shorter.whole",
        "n + 1 if is_whole else 0",
        "stop_strings_across",
    ),
    Mutant(
        "tokenizer.py",
        "before, *after = self._written(marked, add_generation_prompt).split(end_mark)",
        "before, *after = self._written(marked, add_generation_prompt).rsplit(said.strip(), 1)",
        "continued_answers_that_the_template",
    ),
    Mutant(
        "tokenizer.py",
        "self._control_in(_checked(text)) if parse_special else []",
        "self._control_in(_checked(text))",
        "typed_control_tokens_are_text",
    ),
    Mutant(
        "tokenizer.py",
        '"legacy", not config',
        '"legacy", True',
        "control_tokens_of_a_tokenizer_model",
    ),
    Mutant(
        "tokenizer.py",
        "            end -= self.stops.begun\n",
        "            pass\n",
        "stop_strings",
    ),
    Mutant(
        "tokenizer.py",
        "                end -= stop\n",
        "                end -= 1\n",
        "stop_strings_across",
    ),
    Mutant("tokenizer.py", "places.add(start)", "pass", "half_typed"),
    Mutant(
        "tokenizer.py",
        'utf8_errors = "replace" if',
        'utf8_errors = "replace" if not',
        "tokenizer_json_equals",
    ),
    Mutant(
        "tokenizer.py",
        "isdisjoint(range(*s))",
        "isdisjoint(range(s[0] + 1, s[1]))",
        "typed_control",
    ),
    Mutant("loading/templates.py", "trim_blocks=True, ", "", "template_has"),
    Mutant("session.py", "if token in self.eos:", "if False:", "either_end"),
    Mutant("session.py", "min(size // 4, 256)", "min(size // 2, 256)", "fits_into"),
    Mutant("session.py", "excess + 1 :]", "excess:]", "fits_into"),
    Mutant(
        "session.py",
        "Logprob(token, score.logprob,",
        "Logprob(token, -score.logprob,",
        "texts_in_any",
    ),
    Mutant(
        "session.py",
        "            for text in texts:\n                text.close()\n",
        "            pass\n",
        "a_batch",
    ),
    Mutant(
        "texts.py",
        "    def __del__(self) -> None:\n        self.close()",
        "    def __del__(self) -> None:\n        pass",
        "forgotten_text_ends",
    ),
    Mutant(
        "prompts.py",
        "            if answer.lacks_text:",
        "            if False:",
        "cut_answer",
    ),
    Mutant(
        "session.py",
        "        if answer.answered:\n            said",
        "        if True:\n            said",
        "chat_in_any",
    ),
    Mutant(
        "session.py",
        "        *turns, message, _ = self.turns\n",
        "        *turns, message, _ = self.turns\n        self.turns = turns\n",
        "chat_in_any",
    ),
    Mutant(
        "session.py",
        "(self.sampling.seed + 1) %",
        "(self.sampling.seed + 2) %",
        "chat_in_any",
    ),
    Mutant("speculation/proposals.py", "if not captured:", "if True:", "costs_what_the_device"),
    Mutant(
        "speculation/proposals.py",
        "        self.known[first] = ids[:known]  # should anything interrupt this\n",
        "",
        "draft_of_the_same",
    ),
    Mutant(
        "speculation/proposals.py",
        "= ids + guesses[:-1]",
        "= ids + guesses",
        "draft_of_the_same",
    ),
    Mutant(
        "speculation/proposals.py",
        "        mask = self.mask\n        if wish",
        "        mask = None\n        if wish",
        "draft_of_another_vocabulary",
    ),
    Mutant(
        "speculation/proposals.py",
        "mask[:shared] & wish.mask[:shared]",
        "mask[:shared]",
        "draft_of_the_same_model",
    ),
    Mutant(
        "speculation/proposals.py",
        "agreeing(self.known.get(first, []), ids), len(ids) - 1)",
        "agreeing(self.known.get(first, []), ids), len(ids))",
        "draft_keeps",
    ),
    Mutant(
        "speculation/heads.py",
        "ahead = int(pass_ is not self.target)",
        "ahead = 0",
        "plain_torch and speculators",
    ),
    Mutant("speculation/heads.py", "model.whole_ops", "model.ops", "ranks_propose and head"),
    Mutant(
        "speculation/heads.py",
        "if w.norm_before_residual:",
        "if False:",
        "plain_torch and speculators",
    ),
    Mutant(
        "speculation/heads.py",
        "return ops.rmsnorm(h, w.norm, pass_.norm_eps) if w.norm_output else h",
        "return h",
        "plain_torch and qwen",
    ),
    Mutant(
        "speculation/heads.py",
        "wish.mask & self.mask",
        "wish.mask",
        "plain_torch and speculators",
    ),
    Mutant(
        "speculation/heads.py",
        "count = min(count, self.counts.get(source, 0))",
        "count = min(count, 99)",
        "text_begins_with",
    ),
    Mutant(
        "speculation/heads.py",
        "        self.stated.discard(target)\n",
        "",
        "from_one_position_earlier",
    ),
    Mutant(
        "speculation/heads.py",
        "own.place[0] = self.cache.spare",
        "pass",
        "writes_no_keys",
    ),
    Mutant(
        "speculation/heads.py",
        "self.cache.copy(source, target, count)",
        "pass",
        "text_begins_with",
    ),
    Mutant(
        "speculation/heads.py",
        "        head.last.index_copy_(0, self.runs, states.index_select(0, last_rows))\n",
        "",
        "in_company and eagle",
    ),
    Mutant(
        "speculation/heads.py",
        "self.states[0] = self.last[index]",
        "self.states[0] = 0",
        "prompt_in_chunks",
    ),
    Mutant(
        "speculation/heads.py",
        "(proposed != drawn) | self.ends",
        "proposed != drawn",
        "same_the_second_time",
    ),
    Mutant("speculation/heads.py", "[(spare, 1, N)]", "[(spare, 1, 0)]", "padding_of_a_chain"),
    Mutant(
        "speculation/head_file.py",
        "if not made.isfinite().all():",
        "if False:",
        "hostile and NaN",
    ),
    Mutant(
        "speculation/head_file.py",
        "if getattr(own, name) != only:",
        "if False:",
        "hostile and RoPE",
    ),
    Mutant(
        "speculation/head_file.py",
        'f | f.sub("eagle_config")',
        "f",
        "plain_torch and normed",
    ),
    Mutant(
        "speculation/head_file.py",
        "side_by_side if part.field",
        "own if part.field",
        "plain_torch and speculators",
    ),
    Mutant(
        "speculation/head_file.py",
        "if Files(path).has_weights():",
        "if True:",
        "hub_in_shards",
    ),
    Mutant(
        "speculation/head_file.py",
        "len(known) < len(self.ids) or ",
        "",
        "hostile and twice",
    ),
    Mutant(
        "engine.py",
        "places = pass_.place[:: pass_.longest].long() + 1",
        "places = pass_.place[:: pass_.longest].long()",
        "constraint_is_that",
    ),
    Mutant(
        "engine.py",
        "bool(proposer) and any(s.plain for s in sequences)",
        "bool(proposer) and all(s.scores is None for s in sequences)",
        "constraint_is_that_of_one_text",
    ),
    Mutant(
        "talk/openai.py",
        'given.setdefault("enable_thinking", False)',
        "pass",
        "thinking",
    ),
    Mutant(
        "engine.py",
        "if sequence.pos == len(prompt) and slot.prompt != prompt:",
        "if sequence.pos == len(prompt):",
        "from_one_position_earlier",
    ),
    Mutant(
        "engine.py",
        "non_blocking=True, copy=True",
        "non_blocking=True",
        "plain_torch and speculators and True",
    ),
    Mutant(
        "kernels.py",
        "norms + half * C + offs_c",
        "norms + offs_c",
        "op_equals and side_by_side",
    ),
    Mutant("speculation/proposals.py", "if proposed or waited:", "if proposed:", "costs_3_percent"),
    Mutant(
        "talk/chat.py",
        "            text = text.translate(HARMLESS)\n",
        "            pass\n",
        "control_characters_are",
    ),
    Mutant(
        "talk/chat.py",
        "        tokens_per_s = timings.steps / timings.step_seconds",
        "        tokens_per_s = timings.new_tokens / timings.step_seconds",
        "said_of_a_run",
    ),
    Mutant(
        "talk/chat.py",
        '        if generation.ended_by == "interrupt" and not self.survives_ctrl_c:\n',
        "        if False:\n",
        "ctrl_c_exits",
    ),
    Mutant(
        "talk/chat.py",
        "        self.conversation.clear()\n",
        "        pass\n",
        "chat_in_any",
    ),
    Mutant(
        "talk/chat.py",
        "self.conversation.go_on_from(messages)",
        "messages",
        "chat_in_any",
    ),
    Mutant("grammars.py", "lambda node: False", "lambda node: True", "grammars_of_all_kinds"),
    Mutant("talk/openai.py", "session.check_ids(self.tokens)", "self.tokens", "serve_refusals"),
    Mutant(
        "talk/llamacpp.py",
        "event(said | self._probabilities(logprobs))",
        "event(said)",
        "serve_as_llama_cpp",
    ),
    Mutant(
        "tokenizer.py",
        "return _checked(text, ",
        "return text or (",
        "template_errors and half",
    ),
    Mutant(
        "run.py",
        "1e3 * t.step_seconds / t.steps:.2f",
        "1e3 * t.step_seconds / t.new_tokens:.2f",
        "said_of_a_run",
    ),
    Mutant(
        "settings.py",
        "repeat_last_n: int = _row(64,",
        "repeat_last_n: int = _row(63,",
        "not_given",
    ),
    Mutant("run.py", "    if args.seed < 0:", "    if args.seed <= 0:", "flags_at"),
    Mutant(
        "run.py", "        args.stop = [unescaped(stop) for stop in args.stop]\n", "", "flags_at"
    ),
    Mutant(
        "run.py",
        "made_for_chat = bool(session.tokenizer.template_name)",
        "made_for_chat = True",
        "without_a_template",
    ),
    Mutant(
        "serve.py",
        "if not origin or own or self.is_allowed_origin(origin):",
        "if True:",
        "serve_origins",
    ),
    Mutant("serve.py", "asked != host", "False", "allowed_where_it_comes_from"),
    Mutant(
        "sampling.py",
        "logits.sub_(frequency * counts + presence * (counts > 0))",
        "logits.sub_(frequency * counts + presence * (counts >= 0))",
        "biases_and_penalties",
    ),
    Mutant(
        "sampling.py",
        "own = (at >= sampler.begins[:, None])",
        "own = (at > sampler.begins[:, None])",
        "biases_and_penalties",
    ),
    Mutant(
        "constraints.py",
        "self._end = self._end[-len",
        "self._end = self._end[:-len",
        "comes_before",
    ),
    Mutant(
        "prompts.py",
        "texts = []  # it says",
        "pass  # it says",
        "what_the_text_has_to_be",
    ),
    Mutant("talk/tools.py", 'any(end in new for end in "}]>")', '"}" in new', "are_complete"),
    Mutant("talk/tools.py", "self._space = text[end:]", 'self._space = ""', "read_alike"),
    Mutant("talk/tools.py", "JSONDecoder(strict=False, ", "JSONDecoder(", "read_alike"),
    Mutant("talk/tools.py", 'char == "<"', "False", "read_alike"),
    Mutant("talk/tools.py", "if begun and begun.name in self.tools", "if begun", "read_alike"),
    Mutant("talk/tools.py", "call and call.name in tools", "call", "read_alike"),
    Mutant("constraints.py", "not in_string and ", "", "digits_are_left_out"),
    Mutant("constraints.py", "(0 if before else self._run)", "0", "numbers_end"),
    Mutant("talk/openai.py", "index * SEEDS_APART", "0", "several_choices"),
    Mutant("serve.py", 'if name != self.about["id"]:', "if False:", "serve_paths"),
    Mutant("engine.py", "both := mask & s.mask", "both := mask | s.mask", "grammars_of_all_kinds"),
    Mutant("grammars.py", "k not in EMPTY or EMPTY[k]", "EMPTY.get(k)", "grammars_of_all_kinds"),
    Mutant("grammars.py", '{"anyOf", "oneOf", "$ref"}', "set()", "have_the_properties"),
    Mutant(
        "prompts.py", "(prompt), self.ctx_size - (n != 0)", "(prompt), self.ctx_size", "wrong_calls"
    ),
    Mutant("formats.py", "columns_of(places % K,", "columns_of(places,", "experts_equal"),
    Mutant(
        "talk/cli.py", "if not low <= value <= high:", "if not low <= value < high:", "flags_at"
    ),
    # a loop over blocks that small models enter once
    Mutant(
        "loading/layouts.py",
        "for start in range(0, N, step):",
        "for start in range(0, step, step):",
        "tied_embeddings",
    ),
    Mutant(
        "loading/reading.py",
        "for i in range(0, len(outer), step):",
        "for i in range(0, min(step, len(outer)), step):",
        "checkpoints_equal_transformers",
    ),
    # one of two paths
    Mutant("launch.py", "(x + 0.0).to(", "x.to(", "either_sign"),
    Mutant("experts.py", "& -BLOCK) + (BLOCK - 1 - offs)", "& -BLOCK) + offs", "that_tie"),
    Mutant("experts.py", "there & (key == TAKEN)", "there", "eight_of_128"),
    Mutant("experts.py", "pass_.norm_topk)\n    weights", "True)\n    weights", "that_tie"),
    Mutant("experts.py", "if SIZES.norm_topk:", "if True:", "that_tie"),
    Mutant("experts.py", "expert, 1 << 16, 0)", "expert, 0, 0)", "are_sorted"),
    Mutant("experts.py", "(values * inv_rms * factors)", "(values * factors)", "equal_their_ref"),
    Mutant("launch.py", "program_id(1), matrix)", "program_id(1), 0)", "equal_their_reference"),
    Mutant("experts.py", "rmsnorm(x, layer.ffn_norm,", "rmsnorm(x, x[0],", "routers_equal"),
    # a helper that reference and kernel share
    Mutant("sampling.py", "if s.repeat_last_n < 0:", "if s.repeat_last_n <= 0:", "looks_back"),
    # of a union the set that tests mostly have in the other one
    Mutant("prompts.py", "dict(eos=self.eos | ids,", "dict(eos=ids,", "either_end"),
    Mutant("prompts.py", "dict(eos=self.eos | ids,", "dict(eos=self.eos,", "either_end"),
    # an argument that only the function's own test gave
    Mutant(
        "bench.py", "quality(parts, len(text.encode()))", "quality(parts, len(text))", "perplexity"
    ),
    # families
    Mutant(
        "model.py",
        "keep[..., 0] = 1",
        "keep[..., 0] = config.rope_gain",
        "families_equal",
    ),
    Mutant("model.py", "q.mul_(q_scale)", "pass", "families_equal"),
    Mutant("loading/hub.py", "error = error.__cause__ or error", "pass", "refusals_are_one"),
    Mutant("loading/place.py", "if options.parallel > MAX_FEW", "if False", "memory_of_7b"),
]


@cache
def tests_in(file: str) -> list[str]:
    """The names of the tests in a file."""
    return re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)


def test_files(words: str) -> list[str]:
    """The files with tests whose names match the words, or one of these joined by "or"; of each, the
    part before "and" decides."""
    names = [part.strip("()").partition(" and ")[0] for part in words.split(" or ")]
    matches = lambda file: any(name in test for name in names for test in tests_in(file))
    return [file for file in TEST_FILES if matches(file)]


def stale(mutants: list[Mutant]) -> Iterator[str]:
    """A line for each mutant whose text or tests are not there."""
    for mutant in mutants:
        if not test_files(mutant.words):
            yield f"no test is named {mutant.words!r}: mend this mutant"
        file = ROOT / mutant.file
        count = file.read_text().count(mutant.old) if file.is_file() else 0
        if count != 1:
            yield f"{mutant.file} has {mutant.old!r} {count} times, not once: mend this mutant"


def run_tests(folder: Path, words: str, output: Path, caches: bool) -> None:
    """In a process of its own, run the tests whose names match the words up to the first failure,
    and exit with pytest's code. caches: whether what is compiled may be kept, which is for the
    program without a change."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = not caches
    code = pytest.main([*"-q -x -p no:cacheprovider".split(), *test_files(words), "-k", words])
    sys.stdout.flush()
    os._exit(code)


def first_failure(folder: Path, words: str, caches: bool = False) -> str | None:
    """The first test to fail of those whose names match the words. Returns None if all pass.
    Raises RuntimeError if none can be run."""
    output = folder / "output"
    process = FORKS.Process(target=run_tests, args=(folder, words, output, caches))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        return f"not finished after {SECONDS} seconds"
    if process.exitcode < 0:  # what the interpreter's kernels read or write out of bounds
        return signal.strsignal(-process.exitcode)
    if process.exitcode == 0:
        return None
    said = output.read_text()
    failed = re.search(r"^(?:FAILED|ERROR) \S+?::(.*?)(?: - |$)", said, re.MULTILINE)
    if process.exitcode > 1 or failed is None:
        raise RuntimeError(f"pytest -k {words!r} ({process.exitcode}): {said[-600:]}")
    return failed[1]


def noticed(mutant: Mutant, copy: Path) -> bool:
    """Whether a test fails when the mutant is put into this copy of the program."""
    start = time.monotonic()
    file = copy / mutant.file
    source = file.read_text()
    file.write_text(source.replace(mutant.old, mutant.new))
    failure = first_failure(copy, mutant.words)
    file.write_text(source)
    change = f"{' '.join(mutant.old.split())} -> {' '.join(mutant.new.split())}"
    took = time.monotonic() - start
    print(f"{mutant.file}: {change}: {failure or 'NOT NOTICED'} ({took:.0f} s)", flush=True)
    return failure is not None


def passes(words: str, copy: Path) -> bool:
    """Whether the tests whose names match the words pass without any change."""
    failure = first_failure(copy, words, caches=True)
    if failure:
        print(f"{failure} fails without any change", flush=True)
    return not failure


def prepare() -> None:
    """What all forks have in common."""
    del sys.path[0]  # this folder, whose kernels.py is not the program's
    # has to be said before Triton is imported
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in LARGE_PACKAGES:
        importlib.import_module(name)
    # a draw that fails need not be made small
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", phases=phases)
    hypothesis.settings.load_profile("mutants")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="only the mutants of these files")
    parser.add_argument("--check", action="store_true", help="only whether each one can be made")
    args = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if not args.files or mutant.file in args.files]
    if not mutants:
        sys.exit(f"error: no mutants of {', '.join(args.files)}")
    found = list(stale(mutants))
    if found:
        sys.exit("\n".join(found))
    if args.check:
        print(f"{len(mutants)} mutants can be made")
        return 0
    prepare()
    ignored = shutil.ignore_patterns(".*", "__pycache__")
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(os.cpu_count()) as pool:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for i in range(os.cpu_count()):
            copies.put(Path(shutil.copytree(ROOT, Path(made) / str(i), ignore=ignored)))

        def in_a_copy(act, what) -> bool:
            copy = copies.get()
            try:
                return act(what, copy)
            finally:
                copies.put(copy)

        words = [*dict.fromkeys(f"({mutant.words})" for mutant in mutants)]
        shares = [" or ".join(words[i :: os.cpu_count()]) for i in range(os.cpu_count())]
        if not all([*pool.map(partial(in_a_copy, passes), filter(None, shares))]):
            return 1
        return 0 if all([*pool.map(partial(in_a_copy, noticed), mutants)]) else 1


if __name__ == "__main__":
    sys.exit(main())
