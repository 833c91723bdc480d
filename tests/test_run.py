"""Tests of run.py: the command line."""

import io
import itertools
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from tqdm import tqdm

import bench
import run
import serve
from engine import Timings
from loading.checkpoint import Checkpoint, open_tokenizer
from loading.place import DTYPES
from model import Llama
from passes import PROMPT_CHUNK
from sampling import Sampling
from session import Session
from settings import DTYPE_NAMES
from talk import chat as chat_module
from talk import cli as cli_module
from tests.helpers import (
    DEVICE,
    GREEDY,
    HERE,
    PATIENCE,
    assert_refused,
    caller,
    edit,
    hugging_face_model,
    in_shell,
    objects,
    program,
    train_sentencepiece,
)


def test_stdout_has_only_the_text(cli, tiny):
    flags = ("-m", tiny, "-p", "Once upon", "-n", 8, "--device", "auto")
    code, out, err = cli(*flags, "--temp", 0)
    assert code == 0 and out.startswith("Once upon") and out.endswith("\n") and len(out) > 10
    for word in ("load", "prompt", "generated 8 tokens", "memory", f"fp32 on {DEVICE}"):
        assert word in err
    assert "seed" not in err, "with --temp 0 it means nothing"
    alone = cli(*flags, "--temp", 0, "--no-display-prompt", "--quiet")
    assert alone == (0, out[len("Once upon") :], "")
    code, out, err = cli(*flags[:4], "-n", 0)
    assert (code, out) == (0, "Once upon\n")
    assert "generated 0 tokens\n" in err and "tokens/s" not in err
    _, out, err = cli(*flags)
    seed = int(err.split("seed ")[1].split()[0])
    assert cli(*flags, "--seed", seed)[1] == out != cli(*flags, "--seed", seed + 1)[1]


def test_what_is_said_of_a_run(tiny_session, tiny, monkeypatch):
    """Its numbers, which others compare. A layer has 33,920 weights, a token 64 in two matrices."""
    tokens = tiny_session.model.config.vocab_size
    assert tiny_session.model.checkpoint.elements == 2 * 33_920 + 64 + 2 * 64 * tokens
    args = run.parse_args(["-m", str(tiny), "-s", "7", "-p", ""])
    model, running = run.summary(args, tiny_session).splitlines()
    shape = "0.1M parameters, 2 layers, dim 64, 4 heads (2 of keys and values)"
    assert model == f"model     {tiny}: {shape}"
    assert running == "running   fp32 on cpu, torch ops, context 256, seed 7"
    options = dict(dtype="fp32", format="e4m3", kv_fp8=True, accumulate="fp32")
    types = "fp32 with e4m3 matrices, e4m3 keys and values, fp32 sums for prompts"
    assert Session(tiny, device="cpu", **options).types() == types
    usage = SimpleNamespace(ru_maxrss=1_500_000)
    monkeypatch.setattr(run.resource, "getrusage", lambda who: usage)
    counts = dict(passes=9, proposed=36, accepted=11)
    timings = Timings(100, 0.5, new_tokens=21, steps=20, step_seconds=4.0, **counts)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2_500_000_000)
    proposals = SimpleNamespace(summary=lambda: "proposals 3 passes")
    session = SimpleNamespace(
        timings=timings, load_seconds=1.254, engine=SimpleNamespace(proposer=proposals), types=lambda: "fp32",
        model=SimpleNamespace(device=torch.device("cuda")),
    )  # fmt: skip
    assert run.closing(session).splitlines() == [
        "load      1.25 s",
        "prompt    100 tokens in 500.0 ms, 200.0 tokens/s",
        "generated 21 tokens, 200.00 ms per token, 5.0 tokens/s",
        "proposals 3 passes",
        "memory    peak 1.54 GB, 2.50 GB on the GPU; fp32",
    ]
    generation = SimpleNamespace(text="a", ended_by="eos", prompt_tokens=120, timings=timings)
    assert chat_module.record(generation) == dict(
        text="a", ended_by="eos", prompt_tokens=120, evaluated_tokens=100, new_tokens=21,
        prompt_seconds=0.5, generation_seconds=4.0, tokens_per_s=5.0, passes=9, proposed_tokens=36,
        accepted_tokens=11,
    )  # fmt: skip
    speed = "21 tokens, 5.0 tokens/s; prompt: 100 of 120 tokens evaluated in 0.50 s"
    assert chat_module.speed(generation) == speed
    timings.add(timings)
    assert timings == Timings(200, 1.0, 42, 40, 8.0, 18, 72, 22)
    session.timings = generation.timings = Timings(100, 0.5, new_tokens=1)  # the prompt's own
    prompt, generated = run.closing(session).splitlines()[1:3]
    assert prompt == "prompt    100 tokens in 500.0 ms, 200.0 tokens/s"
    assert generated == "generated 1 tokens"
    seconds = ("prompt_seconds", "tokens_per_s")
    assert [chat_module.record(generation)[name] for name in seconds] == [0.5, None]


def test_prompt_from_file_stdin_and_escapes(cli, tiny, tmp_path):
    file, flags = tmp_path / "prompt", ("-m", tiny, "-n", 4, "--temp", 0)
    prompt = 'a\nb\t"ż\\ \\d'
    file.write_text(prompt + "\n")
    expected = cli(*flags, "-p", r"a\nb\t\"\xc5\xbc\\ \d")[1]
    assert expected.startswith(prompt)
    for how in (["-f", file], ["--no-escape", "-p", prompt], []):
        assert cli(*flags, *how, stdin=prompt.encode() + b"\r\n")[1] == expected, how
    assert cli(*flags, "-p", "-", stdin=prompt.encode())[1] == expected
    assert_refused(cli(*flags, "-p", r"a\xff", "--quiet"), "the text is not UTF-8")
    for text, kept in (("a\n\n", "a\n"), (" a\r\n", " a"), ("\ta ", "\ta ")):
        file.write_text(text, newline="")
        assert run.read_prompt(SimpleNamespace(prompt=None, file=file)) == kept, "one newline goes"
    assert cli(*flags, "-p", " a ")[1].startswith(" a ")
    out = cli(*flags, "-p", "", stdin=b"hello")[1]
    assert not out.startswith("hello"), "an empty prompt is one"


def test_sampling_of_the_checkpoint(cli, copy):
    """It is used where no flag is given."""
    file = copy / "generation_config.json"
    fields = dict(temperature=0.0, top_p=0.5, top_k=None, repetition_penalty=1.5, do_sample=True)
    file.write_text(json.dumps(fields))
    run = lambda *flags: cli("-m", copy, "-p", "Once", "-n", 8, "-s", 1, *flags)
    _, own, err = run()
    said = "sampling  temp 0, top-p 0.5, repeat-penalty 1.5, repeat-last-n -1 (from the checkpoint"
    assert said in err
    same_flags = ("--temp", 0, "--top-p", 0.5, "--repeat-penalty", 1.5, "--repeat-last-n", -1)
    _, same, err = run(*same_flags)
    assert own == same and "sampling  " not in err
    assert "sampling  top-p 0.5 (" in run("--repeat-penalty", 1, "--temp", 0)[2]
    edit(file, min_p=0.3, top_k=7)
    said = "temp 0, top-k 7, top-p 0.5, min-p 0.3, repeat-penalty 1.5, repeat-last-n -1"
    assert f"sampling  {said} (from the checkpoint" in run()[2]
    assert "min-p" not in run("--min-p", 0)[2].partition("sampling")[2]
    edit(file, top_p=2)
    assert_refused(run(), "generation_config.json: top_p is 2; it must be a number from 0 to 1")
    assert run("--top-p", 0.5)[0] == 0, "what a flag overrides is not judged"
    edit(file, temperature=0.6, top_p=0.9, top_k=-1, min_p=0.2)
    expected = dict(temp=0.6, top_k=-1, top_p=0.9, min_p=0.2, repeat_penalty=1.5, repeat_last_n=-1)
    assert Checkpoint(copy).sampling() == expected
    edit(file, do_sample=False)
    assert Checkpoint(copy).sampling()["temp"] == 0, "as transformers generates"


def test_penalty_of_the_checkpoint_equals_transformers(tmp_path):
    """It looks back on all tokens, the prompt's too."""
    theirs = hugging_face_model(350)
    theirs.lm_head.weight.data[2] = 0.0  # so that the text does not end
    theirs.save_pretrained(tmp_path)
    train_sentencepiece(tmp_path)
    said = dict(do_sample=False, eos_token_id=2, repetition_penalty=1.4)
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    prompt = [random.randrange(3, 300) for _ in range(90)]
    ours = Session(tmp_path, device="cpu", dtype="fp32", quiet=True).generate(prompt, n=60).finish()
    theirs.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path)
    (ids,) = theirs.generate(torch.tensor([prompt]), max_new_tokens=60, pad_token_id=0).tolist()
    assert ours.ids == ids[90:] and len(ids) == 150


def test_settings_that_are_not_supported(cli, copy):
    """One line says so, where they would have an effect."""
    file = copy / "generation_config.json"
    run = lambda *flags: cli("-m", copy, "-p", "Once", "-n", 1, "--temp", 0, *flags)[2]
    off = dict(num_beams=1, typical_p=1.0, no_repeat_ngram_size=0, bad_words_ids=None, min_length=0)
    file.write_text(json.dumps(off))
    assert "note" not in run()
    edit(file, num_beams=4, typical_p=0.9, no_repeat_ngram_size=3)
    expected = "note: generation_config.json: num_beams, no_repeat_ngram_size, typical_p: not supported, ignored\n"
    assert run().count(expected) == 1 and run("--quiet") == ""
    edit(file, do_sample=False, num_beams=1)
    assert "note: generation_config.json: no_repeat_ngram_size: not supported, ignored\n" in run()


@pytest.mark.parametrize("fields, size, context", [
    ({}, None, "256,"), ({}, 16, "16,"),
    ({}, 257, "257 (beyond the model's 256: expect nonsense there),"),
    (dict(max_position_embeddings=9999), None, "8192,"),
    (dict(max_position_embeddings=9999), 0, "9999,"),
    (dict(model_type="mistral", max_position_embeddings=8192), None, "4096,"),
    (dict(model_type="mistral", sliding_window=99), 99, "99,"),
    (dict(model_type="mistral", sliding_window=99), None, "99,"),
    (dict(model_type="mistral", sliding_window=None), 5000, "5000 (beyond the model's 256: "),
])  # fmt: skip
def test_size_of_the_context(cli, copy, fields, size, context):
    """If none is given, the model's own, but at most 8192; of 0, the model's own, however large."""
    edit(copy / "config.json", **fields)
    flags = [] if size is None else ["-c", size]
    code, _, err = cli("-m", copy, "-p", "Once", "-n", 1, *flags)
    assert code == 0 and f", context {context}" in err


def test_context_beyond_the_window(cli, copy):
    edit(copy / "config.json", model_type="mistral", sliding_window=64)
    said = cli("-m", copy, "-p", "Once", "-c", 65, "--quiet", "--no-display-prompt")
    assert_refused(said, "sliding_window is 64: a ctx_size of 65")


def test_a_prompt_with_a_bos_of_its_own(cli, tiny):
    """It stays, as in other programs."""
    run_with = lambda prompt: cli("-m", tiny, "-p", prompt, "-n", 1, "-o", "jsonl")
    (_, once, said), (_, twice, noted) = run_with("a"), run_with("<s>a")
    counts = [objects(out)[0]["prompt_tokens"] for out in (once, twice)]
    assert counts[1] == counts[0] + 1
    assert "the prompt begins with a bos of its own" in noted and "of its own" not in said
    chat = cli("-m", tiny, "--chat", "-p", "<s>a", "-n", 1, "-o", "jsonl")[1]
    assert objects(chat)[0]["prompt_tokens"] > counts[1] + 2, "in a chat it is text"


def test_jsonl_says_why_a_text_ended(cli, tiny):
    flags = ("-m", tiny, "-p", "Once", *GREEDY, "--quiet", "-o", "jsonl")
    text_of = lambda *more: objects(cli(*flags, *more)[1])[0]
    code, out, err = cli(*flags, "-n", 12)
    (whole,) = objects(out)
    length = len(open_tokenizer(tiny).encode("Once"))
    assert code == 0 and err == "" and whole["ended_by"] == "length" and whole["new_tokens"] == 12
    assert whole["prompt"] == "Once"
    assert whole["prompt_tokens"] == whole["evaluated_tokens"] == length
    assert whole["tokens_per_s"] == 11 / whole["generation_seconds"]
    assert whole["text"] + "\n" == cli(*flags, "-n", 12, "-o", "text", "--no-display-prompt")[1]
    stops = ("--stop", whole["text"][4:7], "--stop", "\0")
    assert text_of("-n", 12, *stops)["ended_by"] == "stop"
    full = text_of("-n", -2, "-c", 16)
    assert full["ended_by"] == "context" and full["prompt_tokens"] + full["new_tokens"] == 16
    none = text_of("-n", 0)
    assert none["text"] == "" and none["ended_by"] == "length"
    assert none["tokens_per_s"] is none["prompt_seconds"] is None
    noted = cli(*flags, "-n", -1, "-c", 16, "-o", "text")[2] + cli("-m", tiny, *GREEDY, "-c", 16)[2]
    full = noted.count("note: the context of 16 tokens is full (see -c)\n")
    assert full == 1, "--quiet says nothing"


def test_progress_of_a_long_prompt(cli, tiny, monkeypatch):
    shown, original, ends = io.StringIO(), tqdm, []
    at_once = dict(delay=0, disable=False, mininterval=0, file=shown)
    monkeypatch.setattr("talk.chat.tqdm", lambda **options: original(**options | at_once))
    monkeypatch.setattr("talk.chat.show", lambda text: ends.append(shown.getvalue()[-1]))
    monkeypatch.setitem(PROMPT_CHUNK, "cpu", 16)
    assert cli("-m", tiny, "-p", "fox " * 40, "-n", 1, "-c", 300)[0] == 0
    length = len(open_tokenizer(tiny).encode("fox " * 40))
    bars = [int(done) for done in re.findall(rf"\rprompt: .*?(\d+)/{length} \[", shown.getvalue())]
    assert [*dict.fromkeys(bars)] == [*range(16, length, 16)] and bars[-1] + 16 >= length > 64
    assert {*ends} == {"\r"}, "a bar is cleared before text comes"


def test_flags_of_llama_cpp(cli, tiny, tmp_path):
    flags = "--predict 8 --temperature 0 --repeat-last-n 3 -t 1 -dev none -s 3".split()
    flags = ("-hf", tiny, *flags, "-p", "Once upon")
    expected = cli("-m", tiny, "-n", 8, "--temp", 0, "-p", "Once upon")[1]
    code, out, err = cli(*flags, *"-ngl 99 -fa on -b 512 --mmap -no-cnv".split())
    assert (code, out) == (0, expected)
    assert err.startswith("note: -ngl, -fa, -b, --mmap: no effect here, ignored\n")
    stop = expected[12:14]
    assert cli(*flags, "-r", stop)[1] == expected[: expected.index(stop, 9)] + "\n"
    (tmp_path / "system").write_text("Be kind.\n")
    talk = ("-m", tiny, "-n", 6, *GREEDY, "--chat-template", "llama2", "-p", "hello", "-cnv")
    systems = ("-sys", "Be kind."), ("--system-prompt", "Be kind."), ("-sysf", tmp_path / "system")
    answers = {cli(*talk, *system)[1] for system in systems}
    assert len(answers) == 1 and answers != {cli(*talk)[1]}
    code, out, _ = cli("--version")
    torch_version = torch.__version__.split("+")[0]
    assert code == 0 and re.match(rf"fused-llama with Python 3.*torch {torch_version}", out)
    with open("/dev/full", "w") as full:
        version = [sys.executable, HERE / "serve.py", "--version"]
        failed = subprocess.run(version, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (failed.returncode, failed.stderr) == (1, "error: No space left on device\n")


def test_a_model_without_a_template_completes(cli, copy, monkeypatch):
    """Bare `run.py` at a terminal chats with a model that has one."""
    monkeypatch.setattr(run, "mode_of", lambda args: "bare")
    flags = ("-m", copy, "-n", 4, "--temp", 0)
    code, out, err = cli(*flags, stdin=b"hello")
    assert code == 0 and out.startswith("hello") and "chatting" not in err
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (copy / "tokenizer_config.json").write_text(json.dumps(dict(chat_template=template)))
    code, out, err = cli(*flags, stdin=b"hello\n")
    assert code == 0 and not out.startswith("hello") and "chatting, since there is no prompt" in err


# of filters two, since test_sampling.py knows their limits
FLAGS_AT_THEIR_EDGES = {  # its name in the program, the values that it takes, those that it refuses
    "-c": ("ctx_size", [0, 1, 1 << 24], [-1, (1 << 24) + 1, "", 1.5]),
    "-n": ("n_predict", [-2, -1, 0, 1 << 62], [-3, "", "x"]),
    "--top-k": ("top_k", [-1, 1 << 62], [-2, "", 0.5]),
    "--top-p": ("top_p", [0, 1], [-0.01, 1.01, "", "nan"]),
    "-s": ("seed", [0, (1 << 63) - 1], [-2, 1 << 63, ""]),
    "-t": ("threads", [1, 4096], [0, -1, 4097, ""]),
    "--lookup": ("lookup", [1, 15], [0, -1, 16, ""]),
    "--draft-max": ("draft_max", [1, 15], [0, -1, 16, ""]),
    "-p": ("prompt", ["", "-", "a\tb\r\\ \\d"], []),
    "-sys": ("system", ["", "a\nb"], []),
    "--stop": ("stop", ["", "\n", '"'], []),
    "--dtype": ("dtype", ["auto", "fp32", "fp16", "bf16"], ["", "fp64"]),
    "--fp8": ("format", ["e4m3", "e5m2"], ["", "e3m4"]),
    "--device": ("device", ["cpu", "cuda:1"], []),
}  # fmt: skip


@pytest.mark.parametrize("flag", FLAGS_AT_THEIR_EDGES)
def test_flags_at_their_edges(flag, capfd, monkeypatch):
    name, taken, refused = FLAGS_AT_THEIR_EDGES[flag]
    needed = {"--draft-max": ["--draft", str(cli_module.DEFAULT_MODEL)], "-sys": ["--chat"]}
    others = needed.get(flag, [])
    parse = lambda argv: getattr(run.parse_args([*others, *argv]), name)
    for value in taken:
        written = str(value).replace("\\", "\\\\").replace("\n", "\\n")
        written = written.replace("\t", "\\t").replace("\r", "\\r")
        expected = [value] if name == "stop" else value
        assert parse([flag, written]) == expected, f"{flag} {written!r} means something else"
    for value in refused:
        result = caller(parse, monkeypatch, capfd)(flag, value)
        assert_refused(result, flag, code=2)


def test_flags_that_are_not_given():
    args = vars(run.parse_args([]))
    expected = dict(
        n_predict=-1, stop=[], ignore_eos=False, no_escape=False, min_p=None, repeat_last_n=None,
        temp=None, top_k=None, top_p=None, repeat_penalty=None, ctx_size=None, dtype="auto",
        json_schema=None, grammar=None,
        format=None, kv_fp8=False, device="auto", threads=None, lookup=None, draft_max=4, draft_always=False,
        mode="text", output="text", quiet=False, model=str(cli_module.DEFAULT_MODEL),
    )  # fmt: skip
    assert {name: args[name] for name in expected} == expected
    usual = dict(temp=0.8, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1, repeat_last_n=64)
    assert vars(Sampling()) == usual | dict(presence_penalty=0, frequency_penalty=0, seed=0)
    seeds = {run.parse_args(flags).seed for flags in ([], [], ["-s", "-1"], ["-s", "-1"])}
    assert len(seeds) == 4 and min(seeds) >= 0, "a random seed is another one each time"
    assert run.parse_args(["--fp8"]).format == "e4m3"
    assert run.parse_args(["--int4"]).format == "int4"
    zeros = "--temp 0 --top-k 0 --top-p 0 --min-p 0 --repeat-last-n 0 -s 0 -n 0 -p x".split()
    names = ("temp", "top_k", "top_p", "min_p", "repeat_last_n", "seed")
    assert run.sampling_flags(run.parse_args(zeros)) == dict.fromkeys(names, 0)
    options = dict(n=0, stop=[], ignore_eos=False, schema=None)
    assert run.text_options(run.parse_args(zeros)) == options
    words = r"--no-escape --chat -p \n -sys \n --stop \n".split()
    literal = run.parse_args(words)
    assert literal.prompt == literal.system == r"\n" and literal.stop == [r"\n"]


@pytest.mark.parametrize("main, flags, said", [
    (run.main, "-sys x -p a", "-sys needs --chat"),
    (run.main, "--chat -no-cnv", "-no-cnv cannot be used with --chat"),
    (bench.main, "--perplexity=", "--perplexity is empty"),
    (run.main, "--save d --fp8 --prompt=a", "--prompt cannot be used with --save"),
    (run.main, "--save d", "--save writes matrices in 8 or 4 bits: add --fp8"),
    (run.main, "--int4 --fp8", "both say"),
    (serve.main, "--fp8 --int4", "both say how"),
    *((serve.main, f"{flag}=", f"{flag} is empty")
      for flag in ("--model", "--host", "--api-key", "--alias")),
    (serve.main, "--api-key \udcff", "--api-key: '\\udcff': must be UTF-8"),
    *((serve.main, f"--cors {text}", f"--cors: {text}: must be an origin, such as https://example.org")
      for text in ("Example.org", "https://a/b", "https://a,https://b", "http://[::1")),
    *((serve.main, f"--port {port}", f"{port}: must be from 0 to 65,535") for port in (-1, 65536)),
    *((serve.main, f"--queue {n}", f"{n}: must be from 0 to 10,000") for n in (-1, 10_001)),
    (serve.main, "--temp -1", "--temp"),
    (serve.main, "-n 5", "unknown flag -n (see"),
    (run.main, "--lookup 2 --draft x", "--lookup and --draft both propose tokens; use one"),
    (run.main, "--chat -sys a -sysf b", "both give a system prompt; use one"),
    (run.main, "-p a -j {} --grammar-file b", "--json-schema and --grammar-file both say what the text has to be"),
    (run.main, "-p a -f b", "--prompt and --file both give a prompt; use one"),
    (run.main, "--draft-max 8 -p a", "--draft-max is for --draft"),
    (run.main, "--seed 1e99", "-s/--seed: 1e99: must be a whole number "),
    (run.main, "-p", "-p/--prompt: expected one argument "),
    (run.main, "--tmep 0", "unknown flag --tmep: did you mean --temp?"),
    (run.main, "--top_k 4", "unknown flag --top_k: did you mean --top-k?"),
    (run.main, "-ctk q8_0", "unknown flag -ctk: --kv-fp8 keeps keys and values in 8 bits"),
    (run.main, "--hf-file x.gguf", "unknown flag --hf-file: write -m OWNER/NAME:KIND, such as "),
    (run.main, "-temp 0", "unknown flag -temp: did you mean --temp?"),
    (run.main, "-mg 0", "unknown flag -mg (see"),
    (run.main, "--fp8 --save=", "--save is empty"),
    (run.main, "-m=", "--model is empty"),
    (run.main, "-n5", "unknown flag -n5: did you mean -n? "),  # to argparse, -n with the value 5
    (bench.main, "text", "unexpected argument 'text': write -m 'text'"),
    (run.main, "--mod x", "unknown flag --mod"),  # an abbreviation of --model
    (run.main, "text", "unexpected argument 'text': write -p 'text'"),
    (run.main, "models/tales", "unexpected argument 'models/tales': write -m 'models/tales'"),
    (serve.main, "models/tales", "unexpected argument 'models/tales': write -m 'models/tales'"),
    (run.main, "-\x1b", "unknown flag -?"),
])  # fmt: skip
def test_wrong_usage_exits_2_in_one_line(monkeypatch, capfd, main, flags, said):
    result = caller(main, monkeypatch, capfd)(*flags.split())
    assert_refused(result, said, " (see --help)\n", code=2)


@pytest.mark.parametrize("arguments, stdin, expected", [
    (["-m", "nowhere"], b"", "no file or folder nowhere here; a hub model is written owner/name, or"),
    (["-m", "models/x.gguf"], b"", "no file or folder models/x.gguf here"),
    (["-f", "nofile"], b"", "nofile"),
    (["-f", ""], b"", "No such file"),
    (["-p", "-"], b"abc\xff", "standard input is not UTF-8: byte 0xff at offset 3"),
    (["-p", "Once upon a time there was a fox", "-c", "4"], b"", "tokens > 3 maximum"),
    (["-p", "a", "--device", "tpu"], b"", "unknown device 'tpu'"),
    (["-p", "a", "--accumulate", "fp16"], b"", "accumulate fp16 needs a GPU"),
    (["-p", "a", "--int4"], b"", "w2 has 112 columns; int4 needs a multiple of 32"),
    (["-p", "a\udcffb"], b"", "the text is not UTF-8: it holds U+DCFF at 1"),
    (["-f", "/dev/zero"], b"", "/dev/zero has more than 64,000,000 bytes"),
    (["--chat", "-p", "tell me a tale " * 60, "-c", "64"], b"", "the context holds 64"),
    (["--chat", "-sys", "good day, crow!", "-c", "8"], b"", "the system prompt takes"),
])  # fmt: skip
def test_bad_input_is_one_line_of_error(cli, tiny, arguments, stdin, expected):
    alone = [] if "--chat" in arguments else ["--no-display-prompt"]
    assert_refused(cli("-m", tiny, "--quiet", *alone, *arguments, stdin=stdin), expected)


def test_ids_beyond_the_vocabulary(cli, copy):
    """They are ignored with a note of one line, as in other programs."""
    edit(copy / "generation_config.json", bos_token_id=-7, eos_token_id=[2, 9999])
    code, _, said = cli("-m", copy, "-p", "a", "-n", 1)
    assert code == 0
    for name in "config.json: bos_token_id is -7;", "config.json: eos_token_id is [2, 9999];":
        [line] = [line for line in said.splitlines() if name in line]
        assert line.startswith("note: ") and line.endswith("does not have are ignored")
    assert cli("-m", copy, "-p", "a", "-n", 1, "--quiet")[2] == ""


def test_names_of_ollama(cli, tmp_path, monkeypatch):
    """Where its file lies is said."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    media = "application/vnd.ollama.image."
    digests = {"license": "sha256:1", "model": "sha256:2"}
    layers = [dict(mediaType=media + kind, digest=digest) for kind, digest in digests.items()]
    library = tmp_path / "manifests/registry.ollama.ai/library/llama3.2"
    library.mkdir(parents=True)
    (library / "latest").write_text(json.dumps({"layers": layers}))
    (library / "odd").write_text('{"layers": 5}')
    for name in "llama3.2", "llama3.2:latest":
        said = f"Ollama has {name}: write -m {tmp_path}/blobs/sha256-2\n"
        assert_refused(cli("-m", name, "-p", "a"), said)
    for name in "llama3.2:1b", "llama3.2:odd", "gemma":
        assert "Ollama" not in cli("-m", name, "-p", "a")[2]


def test_errors_with_and_without_their_traceback(cli, tiny, tmp_path, monkeypatch):
    code, out, err = cli("-m", tmp_path, "-p", "a", "--debug")
    assert code == 1 and out == "" and err.startswith("Traceback")
    assert re.search(r"\nFileNotFoundError: .+\n$", err)
    monkeypatch.setattr("loading.place.free_memory", lambda device: 1_000_000)
    said = ("weights", "cache of 256 tokens", "a ctx_size of at most ")
    assert_refused(cli("-m", tiny, "-p", "a"), *said)


@pytest.mark.parametrize("script", ["run.py", "bench.py"])
def test_help_comes_at_once(script):
    """Before anything is imported that takes long; so it has some names from elsewhere."""
    slow = {"torch", "triton", "numpy", "transformers", "sentencepiece", "tokenizers", "jinja2"}
    for flags, code in (("--help", 0), ("--wrong", 2), ("-m nowhere -p 5", 1)):
        shown = in_shell(f'"$PYTHON" -X importtime "$HERE/{script}" {flags}')
        imported = set(re.findall(r"\| +(\S+)$", shown.stderr, re.MULTILINE))
        assert shown.returncode == code and "argparse" in imported, shown.stderr
        assert len(imported) < 250 and not imported & slow, "import these where they are used"
        assert code or "\nmodel:\n" in shown.stdout and "\noutput:\n" in shown.stdout
    assert tuple(DTYPES) == DTYPE_NAMES


def test_a_run_on_a_cpu_imports_no_triton(tiny):
    python = 'env -u TRITON_INTERPRET CUDA_VISIBLE_DEVICES= "$PYTHON" -X importtime'
    shown = in_shell(f'{python} "$HERE/run.py" -m "{tiny}" -p a -n 1 --device cpu')
    assert shown.returncode == 0 and "| torch\n" in shown.stderr, shown.stderr[-3000:]
    assert not re.search(r"\| +triton", shown.stderr)


def test_machine_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch')")
    command = f'PYTHONPATH="{tmp_path}:$HERE" "$PYTHON" -P "$HERE/run.py"'
    shown = in_shell(command, stdin=subprocess.DEVNULL)
    result = (shown.returncode, shown.stdout, shown.stderr)
    assert_refused(result, "pip install -r requirements.txt")


def test_a_gpu_that_torch_does_not_see_gets_one_line(tiny, monkeypatch, capfd):
    """test_place.py knows what it says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("loading.place.unused_gpu", lambda: "torch sees no GPU,\nbut there is one")
    run_on = caller(run.main, monkeypatch, capfd, "--device")
    rest = ("-m", tiny, "-p", "a", "-n", 1)
    code, _, err = run_on("auto", *rest)
    first, *lines = err.splitlines()
    assert code == 0 and " on cpu, " in err
    assert first == "note: torch sees no GPU, but there is one; this runs on the CPU"
    assert not any("GPU" in line for line in lines)
    assert "GPU" not in run_on("cpu", *rest)[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("version", [(3, 10), (3, 11), (3, 13), (3, 14)])
def test_make_wants_a_python_that_torch_knows(tmp_path, version):
    """One line says so, before anything is set up."""
    shutil.copy(HERE / "Makefile", tmp_path)
    (tmp_path / "requirements.txt").touch()
    python = tmp_path / "python3.x"
    python.write_text(
        f"""#!/bin/sh
        [ "$1" = -c ] || {{ echo "ran $*"; exit 1; }}
        exec "{sys.executable}" -c "import sys; sys.version_info = (*{version}, 4, 'final', 0); $2"
        """
    )
    python.chmod(0o755)
    unset = "unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES"
    done = in_shell(f"{unset}; make chat PYTHON=./python3.x", cwd=tmp_path)
    said, *rest = done.stderr.splitlines()
    if version in ((3, 11), (3, 13)):
        assert "ran -m venv .venv\n" in done.stdout and "error: " not in done.stderr
        return
    found = f"./python3.x is Python {version[0]}.{version[1]}"
    remedy = "make chat PYTHON=python3.12"
    assert said == f"error: {found}, but 3.11 to 3.13 is needed: {remedy}"
    assert done.stdout == "" and len(rest) == 1, "only make's own line follows"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_gives_the_prompt_as_it_is(tmp_path):
    shutil.copy(HERE / "Makefile", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    for file in (tmp_path / "requirements.txt", tmp_path / ".venv" / "ready", python):
        file.touch(0o755)
    python.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    prompt = 'He said "hi" for $5; it\'s `here`, \\n and\n--there'
    expected = ["run.py", "-m", "a b", "--no-escape", f"--prompt={prompt}", "-n", "300"]
    unset = "unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES GPUS"  # of the make that runs the tests
    for command in (f"PROMPT={shlex.quote(prompt)} make", f"make PROMPT={shlex.quote(prompt)}"):
        done = in_shell(f"{unset}; {command} -s run MODEL='a b' ARGS=", cwd=tmp_path)
        assert done.stdout.split("\0")[:-1] == expected
        assert done.stderr.startswith("next: make chat")
    for code, made in ((130, 0), (1, 2)):  # after Ctrl-C; after an error
        python.write_text(f"#!/bin/sh\nexit {code}\n")
        done = in_shell(f"{unset}; make chat", cwd=tmp_path)
        assert done.returncode == made and ("make: ***" in done.stderr) == (code == 1), done


@pytest.mark.parametrize("flags", ["-p Once", "--chat -n 20"])
def test_closed_stdout_ends_quietly(tiny, flags):
    flags = ("-m", tiny, *flags.split(), "--ignore-eos", "--quiet")
    process = program(*flags, stdin=subprocess.PIPE)
    process.stdin.write(b"hello\n" * 50)
    process.stdin.close()
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(PATIENCE) == 0 and process.stderr.read() == b""


def test_lost_streams(tiny, tmp_path):
    say = "import talk.cli as c; c.use_safe_streams(); c.note('a note'); print('text'); print(c.sys.stderr.isatty())"
    for lost in ("2>&-", "2>/dev/full", "2> >(exit)", "<&- 2>&-"):
        done = in_shell(f'"$PYTHON" -c "{say}" {lost}', cwd=HERE)
        assert (done.returncode, done.stdout, done.stderr) == (0, "text\nFalse\n", ""), lost
    run = f'"$PYTHON" "$HERE/run.py" -m "{tiny}" --device cpu'
    done = in_shell(f"{run} -p Once -n 3 --quiet >/dev/full")
    assert done.returncode == 1 and done.stderr == "error: No space left on device\n"
    done = in_shell(f"{run} --save saved --fp8 <&- >&- 2>&-", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "saved" / "model.safetensors").is_file(), done


@pytest.mark.parametrize("call", [0, 1, 4])
@pytest.mark.parametrize("flags", ["-p Once", "--chat -p Once", "--chat", "-st"])
def test_ctrl_c_exits_130_after_what_it_has(cli, tiny, monkeypatch, flags, call):
    """While the prompt is evaluated, or after one or four tokens; the input is no terminal."""
    flags = ("-m", tiny, *flags.split(), "-n", 8, *GREEDY, "-o", "jsonl")
    (whole,) = objects(cli(*flags, stdin=b"Once\n")[1])
    calls, forward = itertools.count(), Llama.forward

    def interrupted(self, pass_, logits) -> torch.Tensor:
        if next(calls) == call:
            raise KeyboardInterrupt
        return forward(self, pass_, logits)

    monkeypatch.setattr(Llama, "forward", interrupted)
    code, out, err = cli(*flags, stdin=b"Once\n")
    (cut,) = objects(out)
    assert code == 130, "scripts tell by it that the text is cut"
    assert (cut["ended_by"], cut["new_tokens"]) == ("interrupt", call)
    assert whole["text"].startswith(cut["text"])
    assert call == 0 or f"generated {call} tokens" in err


@pytest.mark.parametrize("line, flags, expected", [
    ("    import torch\n", "-p x", 130),  # the imports
    ("    sys.exit(code)\n", "-m none -p x", 1),  # the end, when the error is reported
])  # fmt: skip
def test_ctrl_c_at_the_edges_of_a_run(tmp_path, line, flags, expected):
    """The program sends it to itself, just before a certain line."""
    indent = " " * (len(line) - len(line.lstrip()))
    before, after = (HERE / "run.py").read_text().rsplit(f"\n{line}", 1)
    kill = f"{indent}os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "run.py").write_text(f"{before}\n{kill}{line}{after}")
    done = in_shell(f'PYTHONPATH="$HERE" "$PYTHON" run.py {flags}', cwd=tmp_path)
    assert done.returncode == expected and "Traceback" not in done.stderr, done
