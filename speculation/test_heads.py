"""Tests of speculation/heads.py: what a head proposes, beside plain torch, and what becomes of a text."""

import json
import math
import random
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from engine import Engine, Sequence
from loading.checkpoint import load, open_checkpoint, read_config
from passes import SPARE, Moment
from ranks.test_ranks import torchrun_bash
from sampling import Sampling, _choose_ref
from speculation.head_file import HeadFile, find_head
from speculation.heads import Head
from speculation.proposals import Lookup
from tests.helpers import (
    MOST_PROBABLE,
    NAN,
    PATIENCE,
    RAMP,
    SEED,
    assert_refused,
    changed_json,
    decode_in_graphs,
    edit,
    exact_model,
    greedy,
    hugging_face_model,
    objects,
    of_hub,
    put,
    set_hub,
    set_one,
    spoil_config,
    spoil_tensors,
)

V, KNOWN = 300, 120  # the model's vocabulary, and the head's
# Tokens that a text may have, so that some proposals are right; of these the head knows five
FEW = [5, 6, 7, 8, 9, 10, 11]
LAYERS = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The folder of a model with as many layers as heads need, and the same in transformers."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(1)
    model = hugging_face_model(V, num_key_value_heads=2, num_hidden_layers=LAYERS)
    model.save_pretrained(folder)
    return folder, model


# ---- heads on disk


def head_tensors(C: int, W: int, F: int, H: int, KH: int, D: int, prefix: str, **more) -> dict:
    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) * 1.5 * columns**-0.5

    layer = {
        "self_attn.q_proj": matrix(H * D, 2 * C),
        "self_attn.k_proj": matrix(KH * D, 2 * C),
        "self_attn.v_proj": matrix(KH * D, 2 * C),
        "self_attn.o_proj": matrix(C, H * D),
        "mlp.gate_proj": matrix(F, C),
        "mlp.up_proj": matrix(F, C),
        "mlp.down_proj": matrix(C, F),
        "input_layernorm": torch.rand(C) + 0.5,
        "hidden_norm": torch.rand(C) + 0.5,
        "post_attention_layernorm": torch.rand(C) + 0.5,
    }
    others = [i for i in torch.randperm(V).tolist() if i not in FEW]
    ids = torch.tensor(sorted(FEW[:5] + others[: KNOWN - 5]))
    found = {f"{prefix}{name}.weight": values for name, values in layer.items()}
    found |= {
        "fc.weight": matrix(C, 3 * W),
        "norm.weight": torch.rand(C) + 0.5,
        "lm_head.weight": matrix(KNOWN, C),
        "d2t": ids - torch.arange(KNOWN),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True),
    }
    return found | more


def llama_fields(C: int, F: int, H: int, KH: int, **more) -> dict:
    return dict(
        model_type="llama", hidden_size=C, intermediate_size=F, num_attention_heads=H, num_key_value_heads=KH,
        num_hidden_layers=1, vocab_size=V, rms_norm_eps=1e-3, rope_theta=5e3, max_position_embeddings=32,
    ) | more  # fmt: skip


def eagle_head(folder: Path, *, as_bin=False, **fields) -> Path:
    """A head in EAGLE's layout, with the model's embedding."""
    tensors = head_tensors(64, 64, 96, 4, 2, 16, "midlayer.")
    config = llama_fields(64, 96, 4, 2, rope_scaling=RAMP)
    config |= dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=KNOWN)
    return written(folder, config | fields, tensors, as_bin)


def speculators_head(folder: Path, **fields) -> Path:
    """One in speculators' layout, narrower than the model, and so with an embedding of its own."""
    own = {"embed_tokens.weight": torch.randn(V, 48)}
    tensors = head_tensors(48, 64, 80, 3, 1, 16, "layers.0.", **own)
    config = dict(
        architectures=["Eagle3Speculator"], speculators_model_type="eagle3", draft_vocab_size=KNOWN,
        norm_before_residual=True, target_hidden_size=64, eagle_aux_hidden_state_layer_ids=[1, 4, 4],
        transformer_layer_config=llama_fields(48, 80, 3, 1),
        speculators_config=dict(verifier=dict(architectures=["LlamaForCausalLM"])),
    )  # fmt: skip
    return written(folder, config | fields, tensors)


def qwen_head(folder: Path) -> Path:
    """One with norms of q and k, all of the vocabulary, and the normed state handed on."""
    tensors = head_tensors(64, 64, 96, 4, 2, 24, "midlayer.")
    for part in "qk":
        tensors[f"midlayer.self_attn.{part}_norm.weight"] = torch.rand(24) + 0.5
    tensors["lm_head.weight"] = torch.randn(V, 64) * 0.2
    del tensors["d2t"], tensors["t2d"]
    config = llama_fields(64, 96, 4, 2, model_type="qwen3", head_dim=24)
    config |= dict(draft_vocab_size=V, norm_output=True)
    config["eagle_config"] = dict(eagle_aux_hidden_state_layer_ids=[0, 3, 7])
    return written(folder, config, tensors)


def written(folder: Path, config: dict, tensors: dict, as_bin: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if as_bin:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


HEADS = {
    "eagle": eagle_head,
    "eagle, torch.save": partial(eagle_head, as_bin=True),
    "eagle, normed residual": partial(eagle_head, eagle_config=dict(norm_before_residual=True)),
    "speculators": speculators_head,
    "speculators, plain residual": partial(speculators_head, norm_before_residual=False),
    "qwen": qwen_head,
}


# ---- plain torch


class Reference:
    """A head in plain torch, as EAGLE's cnets.py and vLLM have it: whole matrices of attention over all
    tokens but the first, each beside the state before it."""

    def __init__(self, folder: Path, model):
        said = json.loads((folder / "config.json").read_text())
        said |= said.get("eagle_config", {})
        self.model = model
        self.said = said
        self.fields = said.get("transformer_layer_config", said)
        if (folder / "pytorch_model.bin").exists():
            tensors = torch.load(folder / "pytorch_model.bin")
        else:
            tensors = load_file(folder / "model.safetensors")
        short = lambda name: re.sub(r"^(midlayer|layers\.0)\.|\.weight$", "", name)
        self.w = {short(name): values.float() for name, values in tensors.items()}
        self.table = self.w.get("embed_tokens", model.get_input_embeddings().weight.detach())
        self.layers = said.get("eagle_aux_hidden_state_layer_ids") or [2, LAYERS // 2, LAYERS - 3]
        self.ids = torch.arange(V)
        if "d2t" in self.w:
            self.ids = torch.arange(KNOWN) + self.w["d2t"].long()

    def norm(self, x, name: str):
        mean = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self.fields["rms_norm_eps"]) * self.w[name]

    def rotated(self, x):
        """x [T, H, D], halves of D together, as in transformers."""
        T, _, D = x.shape
        freqs = self.fields["rope_theta"] ** -(torch.arange(0, D, 2) / D)
        if "rope_scaling" in self.fields:
            r = self.fields["rope_scaling"]
            freqs = r["rope_theta"] ** -(torch.arange(0, D, 2) / D)
            turns = r["original_max_position_embeddings"] * freqs / (2 * math.pi)
            low, high = r["low_freq_factor"], r["high_freq_factor"]
            kept = ((turns - low) / (high - low)).clamp(0, 1)
            freqs = freqs * (kept + (1 - kept) / r["factor"])
        angles = torch.outer(torch.arange(T).float(), freqs)
        cos, sin = (f(angles).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def layer(self, tokens: list[int], h):
        """The head's states after all tokens, from those before them."""
        w, T = self.w, len(tokens)
        normed = self.norm(h, "hidden_norm")
        x = torch.cat((self.norm(self.table[tokens], "input_layernorm"), normed), -1)
        if self.said.get("norm_before_residual"):
            h = normed
        H, KH = (self.fields[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
        q, k, v = (x @ w[f"self_attn.{part}_proj"].T for part in "qkv")
        q, k, v = q.view(T, H, -1), k.view(T, KH, -1), v.view(T, KH, -1)
        if "self_attn.q_norm" in w:
            q, k = self.norm(q, "self_attn.q_norm"), self.norm(k, "self_attn.k_norm")
        q, k = self.rotated(q), self.rotated(k)
        k, v = (t.repeat_interleave(H // KH, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        y = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(T, -1)
        h = h + y @ w["self_attn.o_proj"].T
        y = self.norm(h, "post_attention_layernorm")
        gate, up = y @ w["mlp.gate_proj"].T, y @ w["mlp.up_proj"].T
        return h + (functional.silu(gate) * up) @ w["mlp.down_proj"].T

    @torch.no_grad()
    def propose(
        self, ids: list[int], n: int, sampling=MOST_PROBABLE, allowed=range(V)
    ) -> list[int]:
        kept = self.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        states = torch.cat([kept[i][0] for i in self.layers], -1)
        h = states[:-1] @ self.w["fc"].T
        if sampling.min_p > 0:
            sampling = replace(sampling, top_k=0, top_p=1)
        may = torch.zeros(V, dtype=torch.bool)
        may[[*{*allowed} & {*self.ids.tolist()}]] = True
        tokens = [*ids]
        for _ in range(n):
            out = self.layer(tokens[1:], h)[-1:]
            logits = torch.full((V,), -1e36)
            logits[self.ids] = (self.norm(out, "norm") @ self.w["lm_head"].T)[0]
            logits[~may] = -1e36
            tokens.append(_choose_ref(logits, torch.tensor(tokens), sampling))
            handed = self.norm(out, "norm") if self.said.get("norm_output") else out
            h = torch.cat((h, handed))
        return tokens[len(ids) :]


# ---- what is proposed


def with_head(model, folder: Path, n: int = 4, parallel: int = 1, size=None, always=True) -> Engine:
    engine = Engine(model, parallel, size)
    file = HeadFile(folder, model.checkpoint.folder, model.config)
    engine.proposer = Head(n, engine.passes, file.load(model))
    engine.proposer.always = always
    return engine


def watched(engine: Engine) -> list[tuple]:
    """What was proposed to follow which tokens, and how many of them were accepted."""
    seen = []
    read = engine._read

    def reads(launched) -> None:
        before = [(row.sequence, [*row.sequence.ids]) for row in launched.rows]
        unfinished = [not s.finished for s, _ in before]
        read(launched)
        if launched.verified is not None:
            for i, (s, ids) in enumerate(before):
                if unfinished[i]:
                    count = len(s.ids) - len(ids) - 1
                    seen.append((s, ids, launched.verified[0, i, :-1].tolist(), count))

    engine._read = reads
    return seen


def run_ahead(monkeypatch) -> None:
    """Without a GPU, launch passes as on one: the host reads them one behind. Kernels are only compiled
    while a graph is captured, so a chain, whose tokens kernels write, changes nothing then."""
    decode_in_graphs(monkeypatch)
    graph = lambda run, *_: SimpleNamespace(replay=run, pool=lambda: None)
    monkeypatch.setattr("passes.captured", graph)


def run(engine: Engine, sequences: list[Sequence]) -> None:
    for s in sequences:
        engine.add(s)
    while not engine.idle:
        engine.step()
    for s in sequences:
        assert s.error is None, s.error


ONLY = dict(eos=[i for i in range(V) if i not in FEW], ignore_eos=True)


def text(prompt: list[int], n: int, sampling: Sampling, **options) -> Sequence:
    return Sequence(prompt, lambda *_: False, n, sampling, **ONLY | options)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_proposals_are_those_of_plain_torch(target, tmp_path, kind, graphs, monkeypatch):
    folder, theirs = target
    head = HEADS[kind](tmp_path / "head")
    if graphs:
        run_ahead(monkeypatch)
    model = load(folder, dtype="fp32", device="cpu", quiet=True)
    reference = Reference(head, theirs)
    depths = set()
    for n, length, sampling in (
        (4, 1, MOST_PROBABLE),
        (4, 9, Sampling(temp=1.5, seed=SEED)),
        (1, 2, Sampling(temp=0.7, repeat_penalty=1.2, seed=SEED)),
    ):
        engine = with_head(model, head, n)
        seen = watched(engine)
        run(engine, [text(random.choices(range(3, V), k=length), 20, sampling)])
        for s, ids, proposals, count in seen:
            right = reference.propose(ids, n, sampling, FEW)
            assert proposals == right, (n, len(s.prompt), len(ids))
            depths.add(count)
    assert {0, 1} <= depths, depths


@pytest.fixture(scope="module")
def exact(target):
    """Not to be changed."""
    folder, _ = target
    return exact_model(folder, 64)


SETTINGS = [
    MOST_PROBABLE,
    Sampling(temp=2, top_k=0, top_p=1, min_p=0, seed=5),
    Sampling(temp=0.8, top_k=5, repeat_penalty=1.5, repeat_last_n=6, seed=SEED),
]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["eagle", "speculators"])
def test_text_is_the_same_in_company(exact, target, tmp_path, kind, graphs, monkeypatch):
    """Of three texts at a time, which begin alike or as earlier ones, and now and then go on without
    proposals. What is proposed is what plain torch proposes all the same."""
    head = HEADS[kind](tmp_path / "head")
    reference = Reference(head, target[1])
    begins = [random.choices(FEW, k=k) for k in (1, 8, 14)]
    plan = []
    lengths = random.sample((1, 1, 9, 20, 20, 80, 80, 80), 8)
    lengths.insert(3, 9)  # while this one is written, nothing is proposed
    for i, n in enumerate(lengths):
        prompt = begins[i % 3][: random.choice((1, 8, 14))] + random.choices(FEW, k=i % 2)
        if i == 5:
            prompt = plan[2][0]  # as it was
        options = dict(scores=1) if i == 3 else {}
        plan.append((prompt, n, SETTINGS[i % 3], options))
    with monkeypatch.context() as patch:
        if graphs:
            run_ahead(patch)
        engine = with_head(exact, head, n=3, parallel=3)
        toss = random.Random(SEED)
        engine.proposer.always = False
        engine.proposer.pacer.ready = lambda: toss.random() < 0.9
        seen = watched(engine)
        texts = [text(prompt, n, sampling, **more) for prompt, n, sampling, more in plan]
        run(engine, texts)
        answer = text(texts[2].ids[:40], 12, MOST_PROBABLE)  # what a chat goes on with
        run(engine, [answer])
    for s in (*texts, answer):
        alone = text(s.prompt, s.n, s.sampling)
        run(Engine(exact), [alone])
        assert s.ids == alone.ids
        assert s.finished and len(s.ids) <= engine.size
    assert len(seen) > 20
    assert any(count for *_, count in seen)
    for s, ids, proposals, _ in seen:
        right = reference.propose(ids, len(proposals), s.sampling, FEW)
        assert proposals == right, (texts.index(s), len(s.prompt), len(ids))


def test_a_reused_beginning_is_evaluated_from_one_position_earlier(exact, tmp_path):
    """Since its last state was not kept; the logits of the same prompt are."""
    engine = with_head(exact, eagle_head(tmp_path / "head"))
    for prompt, new in ((FEW, 7), (FEW, 1), ([*FEW, 8, 9], 3), ([*FEW, 8, 5], 2)):
        s = text(prompt, 1, MOST_PROBABLE)
        run(engine, [s])
        assert s.timings.prompt_tokens == new
    logits = torch.randn(1, V)
    engine.slots[0].prompt_logits.copy_(logits)
    run(engine, [text([*FEW, 8, 5], 1, MOST_PROBABLE)])
    assert torch.equal(engine.slots[0].prompt_logits, logits)


def test_a_head_writes_no_keys_for_a_token_without_the_state_before_it(exact, tmp_path):
    """Neither for the first of a text nor for the first after a beginning that is reused, whose keys are
    there already."""
    engine = with_head(exact, eagle_head(tmp_path / "head"), parallel=2)
    cache = engine.proposer.cache
    longer = [*FEW, 8, 9]
    other = [9, 5]
    written = [(FEW, range(1, 7)), (longer, range(7, 9)), (other, range(1, 2)), (longer, range(0))]
    for prompt, positions in written:
        first = cache.run if prompt is other else 0
        before = torch.cat((cache.keys, cache.values)).clone()
        run(engine, [text(prompt, 1, MOST_PROBABLE)])
        changed = (torch.cat((cache.keys, cache.values)) != before).any(-1).any(0).any(0)
        places = changed[: cache.spare].nonzero().flatten().tolist()
        assert places == [first + position for position in positions], prompt


def test_a_text_is_the_same_the_second_time(exact, tmp_path):
    """Behind the last proposal lies then the very token that will be drawn."""
    engine = with_head(exact, eagle_head(tmp_path / "head"), n=1)
    first, second, alone = (text([5, 7], 60, MOST_PROBABLE) for _ in range(3))
    run(engine, [first])
    run(engine, [second])
    run(Engine(exact), [alone])
    assert first.timings.accepted and first.ids == second.ids == alone.ids


def test_padding_of_a_chain_stays_in_its_place(exact, tmp_path, monkeypatch):
    """Three texts have the graph of four."""
    head = eagle_head(tmp_path / "head")
    with monkeypatch.context() as patch:
        run_ahead(patch)
        engine = with_head(exact, head, n=2, parallel=3)
        run(engine, [text([5 + i], 50, MOST_PROBABLE) for i in range(3)])
        chain = engine.proposer.chain(4, 2)
    for pass_, *_ in chain.layout:
        assert pass_.segments[:, 0].max() >= pass_.spare, "there is no padding"
        assert pass_.place.max() < pass_.spare + SPARE


def test_a_prompt_in_chunks_leaves_the_keys_of_a_whole_one(exact, tmp_path):
    engine = with_head(exact, eagle_head(tmp_path / "head"), parallel=2)
    cache = engine.proposer.cache
    prompt = random.choices(FEW, k=20)
    engine.passes.prefill(prompt)
    for start, end in ((0, 7), (7, 8), (8, 20)):
        engine.passes.prefill(prompt[start:end], start, cache.run)
    for whole in (cache.keys, cache.values):
        one, other = (whole[:, :, first + 1 : first + 20] for first in (0, cache.run))
        assert torch.allclose(one, other, atol=1e-5)


def test_a_head_knows_what_a_text_begins_with(exact, target, tmp_path):
    """A copy of what another text has evaluated; of a text without proposals no more than the head
    has."""
    head = eagle_head(tmp_path / "head")
    reference = Reference(head, target[1])
    engine = with_head(exact, head, n=3, parallel=2)
    seen = watched(engine)
    free = partial(text, sampling=MOST_PROBABLE, eos=[], ignore_eos=False)
    first = free(FEW * 2, 30)
    engine.add(first)
    while len(first.ids) < 20:
        engine.step()
    copied = free([*FEW * 2, 8], 12)
    run(engine, [copied])
    assert copied.timings.prompt_tokens == 2
    engine.proposer.always = False
    engine.proposer.pacer.ready = lambda: False
    plain = free([9, 5, 9, 5, 6], 20)
    run(engine, [plain])
    engine.proposer.always = True
    longer = free(plain.ids[:-2], 12)
    run(engine, [longer])
    assert longer.timings.prompt_tokens > 15
    assert {copied, longer} <= {s for s, *_ in seen}
    for _, ids, proposals, _ in seen:
        assert proposals == reference.propose(ids, len(proposals))


def test_a_head_whose_logits_overflow_proposes_nothing_of_use(exact, tmp_path):
    head = eagle_head(tmp_path / "head")
    spoil_tensors(lambda tensors: tensors["norm.weight"].fill_(3e38))(head)
    engine = with_head(exact, head)
    s, alone = (text(FEW, 12, MOST_PROBABLE, eos=[], ignore_eos=False) for _ in range(2))
    run(engine, [s])
    run(Engine(exact), [alone])
    assert s.ids == alone.ids and s.timings.accepted == 0
    assert s.timings.passes == 11 and s.timings.proposed == 44


# ---- what is refused


def twice(tensors: dict) -> None:
    tensors["layers.0.hidden_norm.weight"] = torch.ones(64)


HOSTILE = {  # of d2t, the eighth offset is changed
    "beyond the vocabulary": (set_one("d2t", V - 7), "d2t"),
    "below it": (set_one("d2t", -8), "d2t"),
    "an id twice": (put("d2t", lambda t: torch.zeros_like(t) - torch.arange(KNOWN) + 7), "d2t"),
    "wraps around": (set_one("d2t", -(1 << 63)), "d2t"),
    "ids as floats": (put("d2t", lambda t: t.float()), "d2t is"),
    "NaN": (set_one("midlayer.mlp.up_proj.weight", NAN), "up_proj.weight in model.safetensors holds NaN or inf"),
    "inf": (set_one("fc.weight", math.inf), "fc.weight in model.safetensors holds NaN or inf"),
    "NaN in a norm": (set_one("norm.weight", NAN), "norm.weight in model.safetensors holds NaN or inf"),
    "a shape that lies": (put("lm_head.weight", lambda t: t[:, :32].contiguous()), "lm_head.weight is"),
    "whole numbers": (put("fc.weight", lambda t: t.to(torch.int64)), "fc.weight is"),
    "one missing": (spoil_tensors(lambda t: t.pop("midlayer.hidden_norm.weight")), "hidden_norm.weight is missing"),
    "one twice": (spoil_tensors(twice), "hidden_norm.weight is [64] + [64]"),
    "no d2t": (spoil_tensors(lambda t: t.pop("d2t")), "d2t is missing"),
    "unknown": (spoil_tensors(lambda t: t.update(fc_norm=torch.ones(64))), "fc_norm is unexpected"),
    "more layers": (spoil_config(num_hidden_layers=2), "n_layers is 2"),
    "a bias": (spoil_config(attention_bias=True), "qkv_bias"),
    "a window": (spoil_config(model_type="mistral", sliding_window=16), "sliding_window is 16"),
    "layers without RoPE": (spoil_config(model_type="smollm3", no_rope_layers=[0]), "nope_layers is (0,)"),
    "neither yes nor no": (spoil_config(eagle_config=dict(norm_output="no")), "norm_output is 'no'"),
    "norm_before_fc": (spoil_config(norm_before_fc=True), "norm_before_fc is True"),
    "fc_norm": (spoil_config(eagle_config=dict(fc_norm=True)), "fc_norm is True"),
    "EAGLE-1": (spoil_config(eagle_config=dict(use_aux_hidden_state=False)), "use_aux_hidden_state"),
    "another speculator": (spoil_config(speculators_model_type="dflash"), "'dflash'"),
    "no size": (spoil_config(draft_vocab_size="many"), "draft_vocab_size is 'many'"),
    "a vast vocabulary": (spoil_config(draft_vocab_size=1 << 21), ", expected [2097152"),
    "layers that are none": (spoil_config(eagle_aux_hidden_state_layer_ids=[1, "2", 3]), "[1, '2', 3]"),
    "layers beyond": (spoil_config(eagle_aux_hidden_state_layer_ids=[1, 2, LAYERS]), f"of {LAYERS}"),
    "another vocabulary": (spoil_config(vocab_size=V + 1), f"vocab_size is {V + 1}, not {V}"),
    "another width": (spoil_config(target_hidden_size=48), "hidden_size is 48, not 64"),
    "no weights": (lambda head: (head / "model.safetensors").unlink(), "no weights"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_heads(target, tmp_path, case):
    spoil, said = HOSTILE[case]
    head = eagle_head(tmp_path / "head")
    spoil(head)
    model = load(target[0], dtype="fp32", device="cpu", quiet=True)
    with pytest.raises((ValueError, OSError)) as refused:
        with_head(model, head)
    message = str(refused.value)
    assert said in message and str(head) in message and "\n" not in message, message


def test_a_head_for_which_there_is_no_room(exact, tmp_path, monkeypatch):
    head = eagle_head(tmp_path / "head")
    monkeypatch.setattr("speculation.head_file.free_memory", lambda _: 1000)
    with pytest.raises(MemoryError, match=r"the head .*head takes 0.00 GB, but cpu has 0.00 GB"):
        with_head(exact, head)


def test_a_head_of_another_family(target, tmp_path):
    head = speculators_head(tmp_path / "head")
    with changed_json(head / "config.json") as config:
        config["speculators_config"]["verifier"]["architectures"] = ["Qwen3ForCausalLM"]
    with pytest.raises(ValueError) as refused:
        HeadFile(head, target[0], read_config(target[0]))
    message = str(refused.value)
    assert all(part in message for part in (str(head), str(target[0]), "Qwen3", "Llama")), message


# ---- on the hub


@pytest.fixture
def talking(tiny, tmp_path) -> tuple[Path, Path]:
    """A model with a tokenizer, and a head for it."""
    folder = tmp_path / "talking"
    shutil.copytree(tiny, folder)
    size = read_config(tiny).vocab_size
    model = hugging_face_model(size, num_key_value_heads=2, num_hidden_layers=LAYERS)
    model.save_pretrained(folder)
    return folder, eagle_head(tmp_path / "head", vocab_size=size)


def test_a_head_of_the_hub_is_downloaded_once(hub, tmp_path, monkeypatch):
    """Also what is lacking if only a part of it has been downloaded."""
    head = eagle_head(tmp_path / "head")
    hub.files = of_hub(head)
    folder = find_head("someone/tiny")
    assert hub.fetched() == ["config.json", "model.safetensors"]
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (head / name).read_bytes()
    assert find_head("someone/tiny") == folder and not hub.asked
    weights = folder / "model.safetensors"
    weights.resolve().unlink()
    weights.unlink()
    assert find_head("someone/tiny") == folder
    assert hub.fetched() == ["model.safetensors"] and weights.is_file()
    set_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
    assert find_head("someone/tiny") == folder


def test_a_head_of_the_hub_in_shards(hub, target, tmp_path):
    """Of which one has not been downloaded."""
    head = eagle_head(tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for shard, some in shards.items():
        save_file({name: tensors[name] for name in some}, head / shard)
    (head / "model.safetensors").unlink()
    found = {name: shard for shard, some in shards.items() for name in some}
    index = head / "model.safetensors.index.json"
    index.write_text(json.dumps(dict(weight_map=found)))
    hub.files = of_hub(head)
    folder = find_head("someone/tiny")
    assert hub.fetched() == ["a.safetensors", "b.safetensors", "config.json", index.name]
    (folder / "b.safetensors").resolve().unlink()
    (folder / "b.safetensors").unlink()
    assert find_head("someone/tiny") == folder
    assert hub.fetched() == ["b.safetensors"]
    HeadFile(folder, target[0], read_config(target[0]))


def test_what_is_no_head_is_left_to_others(hub, tiny, tmp_path):
    """Of a model on the hub nothing but small files is downloaded here."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert find_head(str(file)) is None and find_head(str(tiny)) is None
    for _ in range(2):
        assert find_head("someone/tiny") is None
        assert "model.safetensors" not in hub.fetched()
    open_checkpoint("someone/tiny")
    hub.fetched()
    assert find_head("someone/tiny") is None and not hub.asked
    hub.files = {"tiny.Q4_K_M.gguf": b"GGUF"}
    assert find_head("someone/tiny:Q4_K_M") is None and hub.fetched() == []


def test_what_the_hub_refuses_is_one_line(hub):
    with pytest.raises(OSError, match="no folder someone/other here, and no such repository on"):
        find_head("someone/other")
    hub.token = "secret"
    with pytest.raises(OSError, match="on the hub it is gated"):
        find_head("someone/tiny")


# ---- the command line


def flags_of(model: Path, n: int) -> tuple:
    """A text of n tokens, whose record is printed."""
    exact = ("--dtype", "fp32", "-o", "jsonl", "--ignore-eos")
    return ("-m", model, "-p", "a fox", "-n", n, "-s", 5, *exact)


def test_heads_from_the_command_line(hub, cli, talking):
    """By a path, or by a name on the hub."""
    model, head = talking
    hub.files = of_hub(head)
    flags = flags_of(model, 40)
    (plain,) = objects(cli(*flags)[1])
    assert plain["passes"] == 39 and plain["proposed_tokens"] == 0
    for name in head, "someone/tiny":
        code, out, err = cli(*flags, "--draft", name, "--draft-max", 3, "--draft-always")
        (found,) = objects(out)
        assert code == 0 and found["text"] == plain["text"]
        written = found["passes"] + found["accepted_tokens"]
        assert 39 <= written <= 41  # the last pass may have more than were asked for
        assert found["proposed_tokens"] == 3 * found["passes"]
        assert "tokens a pass" in err
    assert hub.fetched() == ["config.json", "model.safetensors"]
    assert_refused(cli(*flags, "--draft-always"), "--draft-always is for", code=2)
    edit(head / "config.json", vocab_size=V)
    refused = cli(*flags, "--draft", head)
    assert_refused(refused, str(head), str(model), f"vocab_size is {V}, not")


@pytest.mark.parametrize("way", ["head", "draft model"])
def test_ranks_propose(cli, talking, way):
    """What one process writes without. A draft model is divided as well; rank 0's clock says when
    proposals pay off."""
    model, head = talking
    flags = flags_of(model, 30)
    (plain,) = objects(cli(*flags)[1])
    own = ("--draft", head, "--draft-always") if way == "head" else ("--draft", model)
    process = torchrun_bash("exec $RUN", *flags, *own)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    (found,) = objects(out.decode())
    assert found["text"] == plain["text"] and found["proposed_tokens"] > 0


def test_what_a_head_has_missed_is_part_of_what_it_costs(exact, tmp_path, monkeypatch):
    """After single tokens the model evaluates these once more, for the head: the pacer is told."""
    now = 0.0

    class Clock(Moment):
        def __init__(self, device):
            super().__init__(device)
            self.shown = now

        def since(self, start) -> float:
            return self.shown - start.shown

    monkeypatch.setattr("engine.Moment", Clock)
    engine = with_head(exact, eagle_head(tmp_path / "head"), always=False)
    prefill = engine.passes.prefill

    def takes_long(*args) -> None:
        nonlocal now
        now += 5
        prefill(*args)

    engine.passes.prefill = takes_long
    pacer, charged = engine.proposer.pacer, []
    pacer.ready = lambda: len(charged) >= 6
    pacer.record = lambda proposed, accepted, seconds, waited: charged.append((proposed, seconds))
    run(engine, [text(FEW, 30, MOST_PROBABLE)])
    assert charged[:8] == [(0, 0)] * 6 + [(4, 5), (4, 0)]


def test_without_a_chain_nothing_is_waited_for(exact, tmp_path, monkeypatch):
    """Beside a text with scores a head proposes nothing: the device is a pass ahead, as ever."""
    run_ahead(monkeypatch)
    engine = with_head(exact, eagle_head(tmp_path / "head"), parallel=2)
    write, ahead = engine._write, []

    def writes(sequences) -> None:
        write(sequences)
        ahead.append((len(sequences), len(engine._launched)))

    engine._write = writes
    run(engine, [text(FEW, 12, MOST_PROBABLE, scores=1), text(FEW, 12, MOST_PROBABLE)])
    assert ahead.count((2, 2)) > 8


def test_always(exact):
    """Proposals that do not pay off are held off, unless they are to be tried always."""
    for always in (False, True):
        engine = Engine(exact)
        engine.proposer = Lookup(3)
        engine.proposer.always = always
        engine.proposer.pacer.ready = lambda: False
        engine.proposer.propose = lambda _, n: [5] * n
        greedy(exact, FEW, 9, engine)
        assert bool(engine.proposer.proposed) == always
