#!/usr/bin/env python3
"""Train the embedded model: text files in, a Llama 2 folder in Hugging Face's layout out.

    python training/train.py --corpus DIR --out DIR        # DIR: train/*.txt, held_out/*.txt

A corpus of 21 MB is tiny for a language model: anything big enough to learn it learns it by heart.
So the recipe is mostly about preventing that. It reads the books many times but never the same way
twice (books.py: sub-word dropout, new requests; here: new windows), trains two larger teachers that
can afford dropout, and has the small model that is shipped imitate their averaged predictions: a
distribution over the next token says more than the one token that occurred. The model is defined
anew here: the inference program updates a cache in place, and gradients cannot flow through that.
"""

import argparse
import json
import math
import multiprocessing
import random
import sys
import tempfile
import time
from bisect import bisect
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import safetensors.torch
import sentencepiece as spm
import torch
import torch.nn.functional as F
from books import BOS, EOS, UNK, Data, epochs, sections, train_tokenizer
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1]))
from training.ops import fused, reference

# ---- the model: Llama 2, named as Hugging Face names it


@dataclass
class Config:
    vocab: int
    dim: int
    layers: int
    kv_heads: int
    hidden: int
    context: int
    head_dim: int = 64
    eps: float = 1e-5
    theta: float = 10000.0

    def rows(self, name):
        """The rows of each matrix that a parameter joins."""
        kv = self.kv_heads * self.head_dim
        if name.endswith("qkv_proj"):
            return (self.dim, kv, kv)
        return (self.hidden, self.hidden)


# Matrices that multiply the same input are one matrix here, and several in the checkpoint
JOINED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


class Attention(nn.Module):
    def __init__(self, c, ops):
        super().__init__()
        self.ops = ops
        self.heads = (c.dim // c.head_dim, c.kv_heads)
        self.qkv_proj = nn.Linear(c.dim, sum(c.rows("self_attn.qkv_proj")), bias=False)
        self.o_proj = nn.Linear(c.dim, c.dim, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (
            t.transpose(1, 2) for t in self.ops.rope(self.qkv_proj(x), cos, sin, *self.heads)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads[0] != self.heads[1]
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c, ops):
        super().__init__()
        self.ops = ops
        self.gate_up_proj = nn.Linear(c.dim, 2 * c.hidden, bias=False)
        self.down_proj = nn.Linear(c.hidden, c.dim, bias=False)

    def forward(self, x):
        return self.down_proj(self.ops.swiglu(self.gate_up_proj(x)))


class Block(nn.Module):
    """x is the residual and h its normalised form, the input of a branch. A branch's output is
    added, with dropout, by the norm that follows it, so a block ends with the first norm of the
    next one."""

    def __init__(self, c, dropout, ops):
        super().__init__()
        self.ops = ops
        self.eps = c.eps
        self.dropout = dropout
        self.self_attn = Attention(c, ops)
        self.mlp = MLP(c, ops)
        # Only their weights are used
        self.input_layernorm = nn.RMSNorm(c.dim)
        self.post_attention_layernorm = nn.RMSNorm(c.dim)

    def forward(self, x, h, cos, sin, next_norm):
        dropout = self.dropout if self.training else 0.0
        norm = self.post_attention_layernorm.weight
        x, h = self.ops.rmsnorm(x, self.self_attn(h, cos, sin), norm, self.eps, h.dtype, dropout)
        return self.ops.rmsnorm(x, self.mlp(h), next_norm, self.eps, h.dtype, dropout)


class Llama(nn.Module):
    def __init__(self, c, ops=reference, dropout=0.0):
        super().__init__()
        self.config = c
        self.ops = ops
        self.embed_tokens = nn.Embedding(c.vocab, c.dim)
        self.layers = nn.ModuleList(Block(c, dropout, ops) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.dim)
        self.dropout = nn.Dropout(dropout)
        angles = torch.outer(
            torch.arange(c.context), c.theta ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            # The last matrix of each branch starts smaller, since the layers' outputs add up
            std = 0.02
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std = 0.02 / math.sqrt(2 * c.layers)
            if p.ndim == 2:
                nn.init.normal_(p, std=std)

    def embed(self, tokens):
        return self.dropout(self.embed_tokens(tokens))

    def hidden(self, x):
        """The input of the classifier. The residual x is in fp32, the rest in autocast's type if it
        is on."""
        device = x.device.type
        dtype = torch.float32
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        norms = [*(block.input_layernorm.weight for block in self.layers), self.norm.weight]
        x, h = self.ops.rmsnorm(x, None, norms[0], self.config.eps, dtype)
        for block, norm in zip(self.layers, norms[1:]):
            x, h = block(x, h, self.cos, self.sin, norm)
        return h

    def forward(self, tokens):
        return F.linear(self.hidden(self.embed(tokens)), self.embed_tokens.weight)

    def classify(self, h, targets):
        """The mean cross-entropy."""
        return self.ops.linear_cross_entropy(
            h.flatten(0, 1), self.embed_tokens.weight, targets.flatten()
        )

    def loss(self, tokens, targets):
        return self.classify(self.hidden(self.embed(tokens)), targets)


KERNELS = {"fused": fused, "plain": reference}

# ---------------------------------------------------------------- training


@dataclass
class Plan:
    """How a model is trained."""

    epochs: int
    lr: float
    decay: float  # of the weights; the embedding's is a tenth of it
    dropout: float
    hide: float  # share of the input tokens that are hidden
    respell: float  # mean probability that sub-word dropout leaves out a merge of the tokenizer


TEACHER = Plan(epochs=12, lr=4e-3, decay=0.5, dropout=0.15, hide=0.05, respell=0.08)
# the student's learning rate is high, which keeps it from learning by heart: without teachers 6e-3
# clearly beat 3e-3
STUDENT = Plan(epochs=18, lr=1e-2, decay=0.3, dropout=0.0, hide=0.0, respell=0.05)
ALIGNED = 0.5  # probability that a document's beginning begins a window
# The shares of the training in which the learning rate rises, and falls to zero
WARMUP = 0.03
FALL = 0.7


class Muon(torch.optim.Optimizer):
    """Momentum that is orthogonalised before it is applied, so that every direction of a weight
    matrix learns at the same speed. Five Newton-Schulz steps (in bf16 on a GPU) do this, for all
    matrices of one shape at once. The result is scaled to the size of an AdamW step, so that one
    learning rate serves both. A parameter that joins several matrices is split into them, with
    `rows` rows each."""

    def __init__(self, params, rows, lr, weight_decay, momentum=0.95):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        self.rows = dict(zip(params, rows))
        for p in params:
            self.state[p]["m"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                for matrix in zip(
                    *(t.split(self.rows[p]) for t in (p, p.grad, self.state[p]["m"]))
                ):
                    shapes.setdefault(matrix[0].shape, []).append(matrix)
            for shape, matrices in shapes.items():
                params, grads, moments = map(list, zip(*matrices))
                torch._foreach_lerp_(moments, grads, 1 - group["momentum"])
                # Nesterov
                update = torch.stack(torch._foreach_lerp(grads, moments, group["momentum"]))
                update = orthogonal(update) * (0.2 * math.sqrt(max(shape)) * group["lr"])
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_sub_(params, list(update.to(params[0].dtype)))


def orthogonal(x):
    """The matrices with all singular values brought close to 1, by Newton-Schulz steps; the factors
    are Muon's own."""
    tall = x.shape[-2] > x.shape[-1]
    if x.is_cuda:
        x = x.bfloat16()
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


def optimizers(model, plan):
    """Muon for the matrices, AdamW for the embedding and the norms."""
    matrices = {
        n.removesuffix(".weight"): p
        for n, p in model.named_parameters()
        if p.ndim == 2 and "embed" not in n
    }
    rows = []
    for n, p in matrices.items():
        rows.append(model.config.rows(n) if n.endswith(tuple(JOINED)) else (len(p),))
    embedding = dict(params=[model.embed_tokens.weight], weight_decay=0.1 * plan.decay)
    norms = dict(params=[p for p in model.parameters() if p.ndim == 1], weight_decay=0.0)
    # On a GPU the rate is on the device, and the step is part of a CUDA graph
    gpu = model.embed_tokens.weight.is_cuda
    lr = torch.tensor(plan.lr, device=model.embed_tokens.weight.device) if gpu else plan.lr
    adamw = torch.optim.AdamW(
        [embedding, norms], lr=lr, betas=(0.9, 0.95), eps=1e-10, fused=gpu, capturable=gpu
    )
    return [adamw, Muon(list(matrices.values()), rows, lr=plan.lr, weight_decay=plan.decay)]


def imitation(logits, guides, y):
    """What to minimise when there are teachers, the cross-entropy with the mean of their
    predictions; and, for the report, the cross-entropy with the actual next token."""
    logits = logits.float()
    soft = sum(guide.float().softmax(-1) for guide in guides) / len(guides)
    return -(soft * logits.log_softmax(-1)).sum(-1).mean(), F.cross_entropy(
        logits.flatten(0, 1), y.flatten()
    )


def windows(size, heads, length, rng):
    """Where the windows of an epoch begin. A model that has only seen windows cut anywhere takes
    what follows the first <s> for the middle of a text, and does not recognise a prompt as a
    beginning; so half of the documents begin a window."""
    starts = []
    at = rng.randrange(length)
    while at + length <= size:
        starts.append(at)
        head = heads[min(bisect(heads, at), len(heads) - 1)]
        if at < head < at + length and rng.random() < ALIGNED:
            at = head
        else:
            at += length
    return rng.sample(starts, len(starts))


def grouped(epoch, args, device, rng):
    """An epoch's tokens, and where its windows begin, with a row for each step."""
    stream, heads = epoch
    starts = windows(len(stream), heads, args.context, rng)
    if not starts:
        sys.exit(
            f"train.py: the books hold {len(stream)} tokens, too few for --context {args.context}"
        )
    batch = min(args.batch, len(starts))
    groups = torch.tensor(starts[: len(starts) // batch * batch], device=device).view(-1, batch)
    return torch.from_numpy(stream.astype(np.int64)).to(device), groups


def pick(tokens, starts, length):
    """Inputs and targets of some windows. Each input begins with <s>, as it does in inference."""
    y = tokens[starts[:, None] + torch.arange(length, device=tokens.device)]
    return torch.cat((torch.full_like(y[:, :1], BOS), y[:, :-1]), 1), y


def compile_plain(model):
    """Compile a plain torch model block by block, since all its blocks share one compilation. Fused
    ops stay as they are."""
    if model.ops is reference:
        for block in model.layers:
            block.compile(dynamic=False)
        model.ops = SimpleNamespace(**vars(reference))
        model.ops.linear_cross_entropy = torch.compile(
            reference.linear_cross_entropy, dynamic=False
        )


def rate(progress):
    """The learning rate's factor: it rises, stays level, and falls to zero."""
    return min(1, (progress + 1e-3) / WARMUP, (1 - progress) / FALL)


def update(model, optims, lr):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optim in optims:
        for group in optim.param_groups:
            group["lr"] = lr
        optim.step()
        optim.zero_grad()


class Graph:
    """A function of tensors as a CUDA graph, since Python takes longer to launch the kernels of a
    step than they take to run. The first calls are not captured, since in them libraries allocate
    their workspaces and kernels are compiled."""

    def __init__(self, function, warmup=3):
        self.function = function
        self.warmup = warmup
        self.graph = None
        self.stream = torch.cuda.Stream()

    def __call__(self, *inputs):
        if self.warmup or self.graph and inputs[0].shape != self.inputs[0].shape:
            self.warmup = max(0, self.warmup - 1)
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                output = self.function(*inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            return output
        if self.graph is None:
            self.inputs = [x.clone() for x in inputs]
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.output = self.function(*self.inputs)
        for mine, given in zip(self.inputs, inputs):
            mine.copy_(given)
        self.graph.replay()
        return self.output


def stepper(model, teachers, plan):
    """A function of inputs, targets and the learning rate that makes one training step and returns
    the cross-entropy."""
    device = model.embed_tokens.weight.device.type
    gpu = device == "cuda"
    imitate = imitation
    if gpu:
        imitate = torch.compile(imitation, dynamic=False)
    optims = optimizers(model, plan)

    def step(x, y, lr):
        with torch.autocast(device, torch.bfloat16, enabled=gpu):
            with torch.no_grad():
                guides = [teacher(x) for teacher in teachers]
            if guides:
                loss, hard = imitate(model(x), guides, y)
            else:
                loss = hard = model.loss(x, y)
        loss.backward()
        update(model, optims, lr)
        return hard.detach()

    return Graph(step) if gpu else step


def fit(name, model, teachers, plan, data, args, seed):
    """Train the model in place and return it. Other processes tokenise the books while the GPU is
    set up."""
    began = time.time()
    rng = random.Random(seed)
    readings = epochs(data, plan, seed)
    device = next(model.to(args.device).parameters()).device
    gpu = args.device == "cuda"
    if gpu:
        for each in (model, *teachers):
            compile_plain(each)
    step = stepper(model, teachers, plan)
    for epoch, reading in enumerate(readings):
        tokens, groups = grouped(reading, args, device, rng)
        losses = torch.zeros((), device=device)
        for i, starts in enumerate(groups):
            x, y = pick(tokens, starts, args.context)
            if plan.hide:
                x = torch.where(torch.rand(x.shape, device=device) < plan.hide, UNK, x)
            lr = plan.lr * rate((epoch + i / len(groups)) / plan.epochs)
            losses += step(x, y, torch.tensor(lr, device=device) if gpu else lr)
        if (epoch + 1) % 4 == 0 or epoch + 1 == plan.epochs:
            done = f"{name}, epoch {epoch + 1} of {plan.epochs}, {time.time() - began:.0f} s"
            loss = losses / len(groups)
            bits = evaluate(model, data)[0]
            say(f"{done}: training loss {loss.item():.3f}, held out {bits:.4f} bits per byte")
    return model.eval()


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def evaluate(model, data):
    """Bits per byte and perplexity per token of the held-out text: windows of 512 tokens without
    overlap, each read afresh after <s>, so that a token is predicted from 256 others on average.
    Every token counts once."""
    was = model.training
    device = next(model.parameters()).device
    model.eval()
    nats = 0.0
    tokens = torch.tensor(data.judged, device=device)
    for y in tokens.split(min(512, model.config.context)):
        x = torch.cat((tokens.new_tensor([BOS]), y[:-1]))
        nats += F.cross_entropy(model(x[None])[0].float(), y, reduction="sum").item()
    model.train(was)
    return nats / math.log(2) / data.n_bytes, math.exp(nats / len(tokens))


def new_teacher(vocab, args):
    shape = shaped(vocab, args.teacher_dim, args.teacher_layers, 1, args.context)
    return Llama(shape, KERNELS[args.kernels], TEACHER.dropout)


def teach(i, file, data, args):
    """Train a teacher and save it: run in a process of its own, and on a GPU of its own if there
    are enough."""
    seed = args.seed + 1 + i
    plan = replace(TEACHER, epochs=args.teacher_epochs)
    torch.manual_seed(seed)
    if args.device == "cuda":
        torch.cuda.set_device(i % torch.cuda.device_count())
    model = new_teacher(data.sp.vocab_size(), args)
    torch.save(rounded(fit(f"teacher {i + 1}", model, [], plan, data, args, seed)), file)


def taught(data, args):
    """The teachers, trained side by side."""
    teachers = [
        new_teacher(data.sp.vocab_size(), args).eval().requires_grad_(False)
        for _ in range(args.teachers)
    ]
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
        files = [Path(folder, str(i)) for i in range(args.teachers)]
        with ProcessPoolExecutor(max(1, args.teachers), context) as pool:
            list(pool.map(teach, range(args.teachers), files, repeat(data), repeat(args)))
        for teacher, file in zip(teachers, files):
            teacher.load_state_dict(torch.load(file))
    return [teacher.to(args.device) for teacher in teachers]


# ---------------------------------------------------------------- the folder

# Llama 2's template, which gives what Meta's code builds
CHAT_TEMPLATE = r"""
{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}
{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{% for message in messages %}
{% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}
""".replace("\n", "")


def shaped(vocab, dim, layers, sharing, context):
    """The config of a model with Llama 2's proportions; `sharing` query heads share one key/value
    head."""
    return Config(vocab, dim, layers, dim // 64 // sharing, dim * 11 // 4 // 64 * 64, context)


def rounded(model):
    """A model's state in fp16, as it is saved."""
    return {name: value.half().cpu() for name, value in model.state_dict().items()}


def save(model, folder):
    """Write everything but tokenizer.model."""
    c = model.config
    state = {f"model.{name}": value for name, value in split(rounded(model), c).items()}
    config = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=c.dim,
        intermediate_size=c.hidden,
        num_hidden_layers=c.layers,
        num_attention_heads=c.dim // c.head_dim,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab,
        max_position_embeddings=c.context,
        rope_theta=c.theta,
        rms_norm_eps=c.eps,
        hidden_act="silu",
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        torch_dtype="float16",
    )
    tokenizer = dict(
        tokenizer_class="LlamaTokenizer",
        add_bos_token=True,
        add_eos_token=False,
        legacy=True,
        model_max_length=c.context,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )
    # Without a penalty the model repeats itself
    generation = dict(bos_token_id=BOS, eos_token_id=EOS, repetition_penalty=1.1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(
        safetensors.torch.save(state, metadata={"format": "pt"})
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")


def split(state, config):
    """The state with joined matrices split into those of the checkpoint."""
    parts = {}
    for name, value in state.items():
        joined = next((j for j in JOINED if j in name), None)
        if joined:
            values = value.split(config.rows(joined))
            parts |= {name.replace(joined, part): v for part, v in zip(JOINED[joined], values)}
        else:
            parts[name] = value
    return parts


# ---------------------------------------------------------------- the command


def say(text):
    print(text, file=sys.stderr, flush=True)


def arguments():
    p = argparse.ArgumentParser(
        description="Train the model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = p.add_argument
    add(
        "--corpus",
        type=Path,
        help="folder with train/*.txt and held_out/*.txt, one paragraph per line",
    )
    add("--out", type=Path, help="folder to write the model to")
    add(
        "--profile",
        action="store_true",
        help="only profile one step of a teacher on random tokens, kernel by kernel",
    )
    add(
        "--seed",
        type=int,
        default=1,
        help="of the weights, the requests and the order of the books",
    )
    add(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where to train",
    )
    add(
        "--kernels",
        choices=tuple(KERNELS),
        help="Triton kernels, or plain torch, compiled on a GPU; the default follows --device",
    )
    add("--vocab", type=int, default=4096, help="size of the tokenizer")
    add(
        "--dim",
        type=int,
        default=256,
        help="width, a multiple of 128: two heads of 64 share a key head",
    )
    add("--layers", type=int, default=9, help="depth")
    add("--context", type=int, default=1024, help="tokens per window")
    add("--batch", type=int, default=32, help="windows per step")
    add("--epochs", type=int, default=STUDENT.epochs, help="passes over the books")
    add("--teachers", type=int, default=2, help="larger models to train first and to imitate")
    add("--teacher-dim", type=int, default=512, help="their width, a multiple of 64")
    add("--teacher-layers", type=int, default=8, help="their depth")
    add("--teacher-epochs", type=int, default=TEACHER.epochs, help="their passes over the books")
    args = p.parse_args()
    if args.kernels is None:
        args.kernels = "fused" if args.device == "cuda" else "plain"
    if not args.profile and not (args.corpus and args.out):
        p.error("give --corpus and --out, or --profile alone")
    if args.dim % 128 or args.teacher_dim % 64:
        p.error("--dim must be a multiple of 128 and --teacher-dim one of 64")
    return args


def read(folder):
    """The books of a folder."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        wanted = "--corpus wants a folder with train/*.txt and held_out/*.txt"
        sys.exit(f"train.py: no *.txt in {folder}: {wanted}")
    return [f.read_text(encoding="utf-8") for f in files]


def prepare(args):
    """Read the books, and train the tokenizer on them."""
    books = [s for text in read(args.corpus / "train") for s in sections(text)]
    held_out = "".join(read(args.corpus / "held_out"))
    path = args.out / "tokenizer.model"
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        train_tokenizer(books, path, args.vocab)
    except RuntimeError as error:
        sys.exit(f"train.py: SentencePiece rejects --vocab {args.vocab}: {error}")
    sp = spm.SentencePieceProcessor(model_file=str(path))
    tales = sum(s.is_tale for s in books)
    say(f"{len(books)} sections, {tales} of them tales; {sp.vocab_size()} tokens; {args.device}")
    return Data(books, sp, sp.encode(held_out), len(held_out.encode()))


def profile(args):
    """Print what one step of a teacher costs."""
    from profile_step import report

    torch.manual_seed(args.seed)
    model = new_teacher(args.vocab, args).to(args.device)
    tokens = torch.randint(args.vocab, (args.batch, args.context + 1), device=args.device)
    x = tokens[:, :-1].contiguous()
    y = tokens[:, 1:].contiguous()
    optims = optimizers(model, TEACHER)
    gpu = args.device == "cuda"
    lr = torch.tensor(TEACHER.lr, device=args.device) if gpu else TEACHER.lr
    state = {}

    def within(function):
        def part():
            with torch.autocast(args.device, torch.bfloat16, enabled=gpu):
                function()

        return part

    parts = {
        "embedding": within(lambda: state.update(x=model.embed(x))),
        "forward": within(lambda: state.update(h=model.hidden(state.pop("x")))),
        "classifier": within(lambda: state.update(loss=model.classify(state.pop("h"), y))),
        "backward": lambda: state.pop("loss").backward(),
        "optimiser": lambda: update(model, optims, lr),
    }
    count = sum(p.numel() for p in model.parameters())
    print(f"{count} parameters, {x.numel()} tokens, {args.kernels} kernels\n")
    report(parts, torch.device(args.device))


def main():
    args = arguments()
    began = time.time()
    if args.profile:
        return profile(args)
    data = prepare(args)
    teachers = taught(data, args)
    plan = replace(STUDENT, epochs=args.epochs)
    torch.manual_seed(args.seed)
    shape = shaped(data.sp.vocab_size(), args.dim, args.layers, 2, args.context)
    model = Llama(shape, KERNELS[args.kernels], plan.dropout)
    save(fit("student", model, teachers, plan, data, args, args.seed), args.out)
    model.load_state_dict(rounded(model))  # what is judged is what was saved
    bits, perplexity = evaluate(model, data)
    print(
        f"{sum(p.numel() for p in model.parameters())} parameters, held out: {bits:.4f} bits per byte, "
        f"perplexity {perplexity:.2f} per token, {time.time() - began:.0f} s in all"
    )


if __name__ == "__main__":
    main()
