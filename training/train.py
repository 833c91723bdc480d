#!/usr/bin/env python3
"""Train a Llama from scratch on a text file, with the shape and the tokenizer of a folder that is there.

    python training/train.py book.txt --out DIR        # then: python run.py -m DIR

The model is defined anew here, since the inference program updates a cache in place, and gradients
cannot flow through that."""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1]))

from loading.hugging_face import HuggingFaceFolder
from loading.layouts import Files
from model import Config
from talk.cli import error_line, note, read_input
from tokenizer import Tokenizer
from training.ops import fused, reference
from training.profile_step import report

# ---- the model: Llama 2, named as Hugging Face names it


class Attention(nn.Module):
    def __init__(self, c, ops):
        super().__init__()
        self.ops = ops
        self.heads = (c.n_heads, c.n_kv_heads)
        self.qkv_proj = nn.Linear(c.dim, c.q_dim + 2 * c.kv_dim, bias=False)
        self.o_proj = nn.Linear(c.q_dim, c.dim, bias=False)

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
        self.gate_up_proj = nn.Linear(c.dim, 2 * c.hidden_dim, bias=False)
        self.down_proj = nn.Linear(c.hidden_dim, c.dim, bias=False)

    def forward(self, x):
        return self.down_proj(self.ops.swiglu(self.gate_up_proj(x)))


class Block(nn.Module):
    """x is the residual and h its normalised form, the input of a branch. A branch's output is
    added, with dropout, by the norm that follows it, so a block ends with the first norm of the
    next one."""

    def __init__(self, c, dropout, ops):
        super().__init__()
        self.ops = ops
        self.eps = c.norm_eps
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
        self.embed_tokens = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleList(Block(c, dropout, ops) for _ in range(c.n_layers))
        self.norm = nn.RMSNorm(c.dim)
        self.dropout = nn.Dropout(dropout)
        frequencies = c.rope_theta ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
        angles = torch.outer(torch.arange(c.max_seq_len), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            # The last matrix of each branch starts smaller, since the layers' outputs add up
            std = 0.02
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std = 0.02 / math.sqrt(2 * c.n_layers)
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
        x, h = self.ops.rmsnorm(x, None, norms[0], self.config.norm_eps, dtype)
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

# ---- training

# The shares of the training in which the learning rate rises, and falls to zero
WARMUP = 0.03
FALL = 0.7
HELD_OUT = 0.1  # the share of the text, at its end, that is not trained on


def optimizer(model: Llama) -> torch.optim.AdamW:
    """Only matrices decay."""
    groups = [
        dict(params=[p for p in model.parameters() if p.ndim == 2], weight_decay=0.1),
        dict(params=[p for p in model.parameters() if p.ndim == 1], weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def update(model: Llama, optim: torch.optim.AdamW, lr: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optim.param_groups:
        group["lr"] = lr
    optim.step()
    optim.zero_grad()


def rate(progress: float) -> float:
    """The learning rate's factor: it rises, stays level, and falls to zero."""
    return min(1, (progress + 1e-3) / WARMUP, (1 - progress) / FALL)


def mixed(device: torch.device) -> torch.autocast:
    """On a GPU products are in bf16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def pick(tokens: Tensor, starts: Tensor, length: int, bos: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of some windows. Each input begins with bos, as it does in inference."""
    y = tokens[starts[:, None] + torch.arange(length, device=tokens.device)]
    return torch.cat((torch.full_like(y[:, :1], bos), y[:, :-1]), 1), y


def fit(model: Llama, tokens: Tensor, bos: int, args: argparse.Namespace) -> None:
    """Train the model in place, on windows that begin anywhere in the text."""
    optim = optimizer(model)
    losses = []
    for step in range(args.steps):
        starts = torch.randint(len(tokens) - args.window + 1, (args.batch,), device=tokens.device)
        x, y = pick(tokens, starts, args.window, bos)
        with mixed(tokens.device):
            loss = model.loss(x, y)
        loss.backward()
        update(model, optim, args.lr * rate(step / args.steps))
        losses.append(loss.detach())
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            mean = torch.stack(losses).mean().item()
            note(f"step {step + 1} of {args.steps}: training loss {mean:.3f} nats a token")
            losses.clear()
    model.eval()


@torch.no_grad()
def nats_of(model: Llama, tokens: Tensor, bos: int, window: int) -> float:
    """The cross-entropy of a text, of windows without overlap. Every token counts once."""
    nats = 0.0
    for part in tokens.split(window):
        x, y = pick(part, torch.zeros(1, dtype=torch.int64, device=part.device), len(part), bos)
        nats += model.loss(x, y).item() * len(part)
    return nats


# ---- from a folder to a folder


def config_of(like: HuggingFaceFolder, window: int) -> Config:
    """The configuration of a folder. Raises ValueError if Llama above is not such a model, or has a
    shorter context than the windows of its training."""
    c = like.config()
    plain = Config(
        dim=c.dim,
        n_layers=c.n_layers,
        n_heads=c.n_heads,
        n_kv_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        hidden_dim=c.hidden_dim,
        vocab_size=c.vocab_size,
        norm_eps=c.norm_eps,
        rope_theta=c.rope_theta,
        max_seq_len=c.max_seq_len,
        tie_embeddings=True,
    )
    is_llama = like.config_json.get("model_type") == "llama"
    if not is_llama or replace(c, dtype=None, bos_id=None, eos_ids=()) != plain:
        raise ValueError(f"{like.path} is no Llama with tied embeddings: give another as --like")
    if window > c.max_seq_len:
        raise ValueError(f"--window {window} is longer than the context of {c.max_seq_len} tokens")
    return c


def apart(state: dict[str, Tensor], c: Config) -> dict[str, Tensor]:
    """The tensors of a checkpoint, which has several matrices where Llama has a joint one."""
    joint = {
        "qkv_proj": {"q_proj": c.q_dim, "k_proj": c.kv_dim, "v_proj": c.kv_dim},
        "gate_up_proj": {"gate_proj": c.hidden_dim, "up_proj": c.hidden_dim},
    }
    tensors = {}
    for name, value in state.items():
        whole = name.split(".")[-2]
        parts = joint.get(whole, {whole: len(value)})
        for part, rows in zip(parts, value.split([*parts.values()])):
            tensors["model." + name.replace(whole, part)] = rows
    return tensors


def save(model: Llama, like: HuggingFaceFolder, out: Path) -> None:
    """Write the model with the other folder's configuration and tokenizer."""
    for name, content in like.small_files().items():
        (out / name).write_bytes(content)
    dtype = model.config.dtype or torch.float16
    tensors = apart(model.state_dict(), model.config)
    stored = {name: value.to("cpu", dtype).contiguous() for name, value in tensors.items()}
    save_file(stored, out / "model.safetensors", {"format": "pt"})


# ---- the command


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description="Train a Llama from scratch on a text file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = p.add_argument
    add("text", nargs="?", help="file of text in UTF-8")
    add("--out", type=Path, help="new folder to write the model to")
    add(
        "--like",
        type=Path,
        default=Path(__file__).resolve().parents[1] / "models" / "tales",
        help="folder of a Llama with tied embeddings: shape, tokenizer and settings are taken from it",
    )
    add(
        "--profile",
        action="store_true",
        help="only profile one step on random tokens, kernel by kernel",
    )
    add("--seed", type=int, default=1, help="of the weights and of what is read when")
    gpu = torch.cuda.is_available()
    add(
        "--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu", help="where to train"
    )
    add("--kernels", choices=tuple(KERNELS), help="Triton's or plain torch's; follows --device")
    add("--steps", type=int, default=1000, help="how many")
    add("--batch", type=int, default=32, help="windows per step")
    add("--window", type=int, default=512, help="tokens per window")
    add("--lr", type=float, default=3e-3, help="learning rate: it rises first, and falls to zero")
    add("--dropout", type=float, default=0.1, help="share of what layers add that is left out")
    args = p.parse_args()
    if not args.profile and not (args.text and args.out):
        p.error("give a text file and --out, or --profile alone")
    if args.kernels is None:
        args.kernels = "fused" if args.device == "cuda" else "plain"
    return args


def new_model(c: Config, args: argparse.Namespace) -> Llama:
    torch.manual_seed(args.seed)
    return Llama(c, KERNELS[args.kernels], args.dropout).to(args.device)


def profile(args: argparse.Namespace) -> None:
    """Print what a step costs."""
    model = new_model(config_of(HuggingFaceFolder(Files(args.like)), args.window), args)
    device = torch.device(args.device)
    tokens = torch.randint(model.config.vocab_size, (args.batch, args.window + 1), device=device)
    x = tokens[:, :-1].contiguous()
    y = tokens[:, 1:].contiguous()
    optim = optimizer(model)
    state = {}

    def within(function):
        def part():
            with mixed(device):
                function()

        return part

    parts = {
        "embedding": within(lambda: state.update(x=model.embed(x))),
        "forward": within(lambda: state.update(h=model.hidden(state.pop("x")))),
        "classifier": within(lambda: state.update(loss=model.classify(state.pop("h"), y))),
        "backward": lambda: state.pop("loss").backward(),
        "optimiser": lambda: update(model, optim, args.lr),
    }
    count = sum(p.numel() for p in model.parameters())
    print(f"{count} parameters, {x.numel()} tokens, {args.kernels} kernels\n")
    report(parts, device)


def train(args: argparse.Namespace) -> None:
    like = HuggingFaceFolder(Files(args.like))
    c = config_of(like, args.window)
    tokenizer = Tokenizer(like.tokenizer_files(), c.vocab_size, c.bos_id)
    text = read_input(args.text)
    known = text[: int(len(text) * (1 - HELD_OUT))]
    unknown = text[len(known) :]
    tokens, judged = (
        torch.tensor(tokenizer.encode(part, bos=False), device=args.device)
        for part in (known, unknown)
    )
    if len(tokens) < args.window or not len(judged):
        raise ValueError(f"{args.text}: {len(tokens)} tokens, too few for --window {args.window}")
    args.out.mkdir(parents=True)
    model = new_model(c, args)
    fit(model, tokens, tokenizer.bos, args)
    save(model, like, args.out)
    bits = nats_of(model, judged, tokenizer.bos, args.window) / math.log(2)
    share = f"the last {HELD_OUT:.0%} of the text, which were not read"
    print(f"{bits / len(unknown.encode()):.3f} bits per byte of {share}")


def main() -> None:
    args = arguments()
    try:
        profile(args) if args.profile else train(args)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error_line(error)}")


if __name__ == "__main__":
    main()
