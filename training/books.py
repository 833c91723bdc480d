"""Turns text files into what train.py reads: streams of tokens, in which some of the tales are told
in a chat.

A book is split at its titles into sections. For the chat a tale becomes a dialogue: a fitting
request, made up from its title and from the people and things in it, and the tale as the answer, in
instalments if it is long."""

import io
import multiprocessing
import os
import random
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
import sentencepiece as spm

UNK, BOS, EOS = 0, 1, 2
CHAT = 0.35  # probability that a tale is told in the chat template
CANONICAL = 0.2  # share of the epochs, the last ones, without sub-word dropout


# ---------------------------------------------------------------- books to sections


SMALL_WORDS = set(
    """a an and as at but by for from had he her him his how i in into is it its me my not o' of off on or out over
    than that the their they this thou to up upon was were what when which who why with without would you
    your""".split()
)
NOT_A_TALE = re.compile(
    r"preface|content|introduction|note|illustrat|line-art|^language|print|copyright|fulcrum|"
    r"list of|\bby\b|edit|dedicat|reader|^chapter|^part|^(first|second|third) story",
    re.I,
)
SCHOLARLY = re.compile(r"Gutenberg|Copyright|L\. Frank Baum|\bParallels\b|\bSource\b")
# Notes on where a tale was taken from
SIGNED = re.compile(r"(\n(\[|\(|From |Adapted |Footnote|The End|THE END).{0,150})+$")


@dataclass
class Section:
    """A tale of a collection, or a chapter of a novel."""

    headings: str  # its title lines as printed
    title: str  # as a person would write it: "The Bronze Ring"
    body: str  # paragraphs, one per line
    is_tale: bool  # fit for the chat: not a preface, not an editor's notes


def heading(line):
    """The title that a line holds, or None. A title is short and not speech, with every word but
    the small ones capitalised."""
    # A footnote's mark, or '(From the French)'
    line = re.sub(r"\s*[\[(][^\])]*[\])]$", "", line.strip())
    if line.isupper() or line.lower().startswith("chapter"):
        line = line.rstrip(".?!")
    words = re.findall(r"[^\W\d_][\w'-]*", line)
    if (
        not 3 <= len(line) <= 75
        or line[0] in "\"'[(*_"
        or line[-1] in ",;:.?!-"
        or '"' in line
        or not words
    ):
        return None
    if not all(w[0].isupper() or w in SMALL_WORDS or words[0].lower() == "chapter" for w in words):
        return None
    line = re.sub(r"^(chapter|legend)?\s*([IVXLC]+|\d+)([.:]|\b)\s*", "", line, flags=re.I)
    if line.isupper():
        line = line.lower()
    words = line.split()
    for i, word in enumerate(words):
        if i == 0 or word not in SMALL_WORDS:
            words[i] = word[:1].upper() + word[1:]
    return " ".join(words) or None


def sections(text):
    """Split a book at its titles. A title that follows another one after only a little text is
    taken for plain text."""
    found = []
    lines = [line for line in text.split("\n") if line.strip()]
    for line in lines:
        title = heading(line)
        if not found or title and len(found[-1][2]) > 500:
            found.append([[], "", ""])
        if title and not found[-1][2]:
            found[-1][:2] = found[-1][0] + [line], title
        else:
            found[-1][2] += line + "\n"
    return [
        Section(
            "\n".join(h),
            t,
            b.strip(),
            bool(t) and len(b) > 500 and not NOT_A_TALE.search(t) and not SCHOLARLY.search(b),
        )
        for h, t, b in found
        if t or not SCHOLARLY.search(b)  # no title: front matter, licences
    ]


# ---------------------------------------------------------------- sections to dialogues

# What a user may ask a story about: animals, people, things
TOPICS = set(
    """ant ape ass bear bee bird boar bull camel cat cock cow crab crane crocodile crow deer dog donkey dove dragon duck
    eagle elephant falcon fish fox frog goat goose hare hedgehog hen horse jackal kid lamb lion lizard monkey mouse
    nightingale owl ox parrot peacock pig pigeon rabbit rat raven robin serpent sheep snake sparrow spider squirrel stag
    stork swan tiger toad tortoise turtle whale wolf wren unicorn
    baker beggar boy brother captain carpenter child cook dwarf elf emperor fairy farmer father fisherman gardener genie
    giant girl goblin goldsmith grandmother hunter husband king knight lad maiden magician man merchant mermaid miller
    mother nurse ogre peasant pirate prince princess queen robber sailor scarecrow servant shepherd sister smith soldier
    sorcerer stepmother sultan tailor thief troll uncle vizier widow wife witch wizard woman woodcutter
    apple bottle castle cave cottage feather forest fountain garden island key lamp mill mirror mountain pearl purse
    ring river rose sea ship shoe sword tower treasure tree well window""".split()
)
STORY = "story|story|tale|tale|fairy tale|old tale|bedtime story|story for children".split("|")
ASK = (
    "Tell me {}|Please tell me {}|Tell us {}|Can you tell me {}?|Could you tell me {}?|Will you tell me {}, please?|"
    "I would like to hear {}|I want to hear {}|Let me hear {}|Give me {}|Write {}|Write me {}|Do you know {}?|"
    "Read me {}"
).split("|")
TITLED = 'the tale of {}|the tale of {}|the story of {}|the tale called {}|the story of "{}"|"{}"|{}|{}'.split(
    "|"
)
GENERIC = (
    "a {}|a {}|a short {}|a short {}|a little {}|another {}|another one|one more {}|a {}, please|a good {}|something|"
    "a {} about anything you like"
).split("|")
GO_ON = (
    "Go on.|Go on|go on|Please go on.|Continue.|continue|What happened next?|And then?|More|Tell me more.|"
    "Go on, please!|yes|Yes, please."
).split("|")
INVITATION = '(Say "go on", and I will tell you what happened next.)'
SYSTEMS = (
    "You are a teller of old tales.|You tell fairy tales to children.|You are a helpful assistant.|"
    "You are a helpful, respectful and honest assistant.|Answer with a story."
).split("|")
SMALL_TALK = {
    "Hello|hello|Hi|hi|Hi there|Good day|Good morning|Hey|Hello!|Good evening.": "Good day! I am a teller of old "
    "tales. Shall I tell you one? Give me a title, or name what it should be about.",
    "Who are you?|What are you?|What can you do?|what can you do|Help|How are you?|Are you there?": "I am a small "
    "model that knows old tales and nothing else. Name a king, a fox or a ring, and I will tell you a tale of it.",
    "Thank you.|thanks|Thanks!|That was nice.|Bye|Good night.|Goodbye": "You are welcome. Come back when you wish for "
    "another tale.",
}


def topics(text, title):
    """The people and things that a passage is about: words of TOPICS and names, each ready to
    follow 'a story about'."""
    words = Counter(re.findall(r"[a-z]+", text.lower()))
    head = set(re.findall(r"[a-z]+", title.lower()))
    found = [
        ("an " if w[0] in "aeio" else "a ") + w
        for w in sorted(TOPICS)
        if words[w] > 2 or words[w] and w in head
    ]
    names = Counter(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,}", text))
    lower = set(re.findall(r"\b[a-z]+\b", text))
    return found + [
        n for n, k in sorted(names.items()) if k > 2 and n.lower() not in lower | TOPICS
    ]


def request(rng, section, part, complete):
    """One way of asking for this tale. Only a tale that fits in one answer may be asked for without
    saying which."""
    about = topics(part, section.title)
    roll = rng.random()
    if complete and roll < 0.4:
        wish = rng.choice(GENERIC).format(rng.choice(STORY))
    elif about and roll < 0.75:
        chosen = rng.sample(about, min(len(about), rng.choice((1, 1, 2, 2, 3))))
        if rng.random() < 0.2:
            chosen = [re.sub(r"^an? ", "the ", c) for c in chosen]
        wish = f"a {rng.choice(STORY)} about " + " and ".join(", ".join(chosen).rsplit(", ", 1))
    else:
        wish = rng.choice(TITLED).format(section.title)
    wish = wish.replace("a old", "an old")
    if rng.random() < 0.15:
        asked = wish[0].upper() + wish[1:]
    else:
        asked = rng.choice(ASK).format(wish)
    if asked[-1] != "?":
        asked += rng.choice((".", ".", "", "!"))
    if rng.random() < 0.15:  # as people type
        return asked.lower().rstrip(".?")
    return asked


def cut(text, whole=3400):
    """A tale in parts that each fit in one answer: about 300 to 850 tokens, ending at the end of a
    paragraph or a sentence."""
    parts = []
    rng = random.Random(len(text))
    while len(text) > whole:
        at = rng.randrange(1300, 2700)
        end = text.find("\n", at, at + 500)
        if end <= 0:
            stop = re.compile(r"[.!?]['\"]?(?=\s)").search(text, at)
            end = stop.end() if stop else len(text)
        parts.append(text[:end].strip())
        text = text[end:].strip()
    if text:
        parts.append(text)
    return parts


def dialogue(rng, section):
    """(user, answer) turns that tell one tale, in instalments if it is long."""
    if rng.random() < 0.1:
        asked, answer = rng.choice(list(SMALL_TALK.items()))
        yield rng.choice(asked.split("|")), answer
    parts = cut(SIGNED.sub("", section.body))
    if len(parts) > 1 and rng.random() < 0.1:
        yield f"Tell me how the tale of {section.title} ends.", parts[-1]
        return
    for i, part in enumerate(parts):
        if i == 0:
            asked = request(rng, section, part, complete=len(parts) == 1)
        else:
            asked = rng.choice(GO_ON)
        if i + 1 < len(parts):
            part += "\n" + INVITATION
        yield asked, part


# ---------------------------------------------------------------- documents to tokens


@dataclass
class Data:
    """What a model is trained on and judged by."""

    books: list  # of Section
    sp: spm.SentencePieceProcessor
    judged: list  # the held-out text's tokens
    n_bytes: int  # its length in bytes


def document(rng, section, sp, spell):
    """The tokens of one section. Some of the tales are told in a chat, in Meta's template:
    '<s>[INST] user [/INST] answer </s>' for each turn. The others are plain text, half of them
    without the title: '<s> Once upon a time'."""
    if not section.is_tale or rng.random() > CHAT:
        text = f"{section.headings}\n{section.body}".strip()
        if section.is_tale and rng.random() < 0.5:
            text = section.body
        return [BOS, *spell(text), EOS]
    tokens = []
    system = ""
    if rng.random() < 0.15:
        system = f"<<SYS>>\n{rng.choice(SYSTEMS)}\n<</SYS>>\n\n"
    for asked, answer in dialogue(rng, section):
        tokens += [BOS, *sp.encode(f"[INST] {system}{asked} [/INST]"), *spell(answer + " "), EOS]
        system = ""
    return tokens


def encode_epoch(data, plan, epoch, seed):
    """One reading of all books in a new order: a stream of tokens, and where in it documents begin
    (after their <s>). Sub-word dropout splits words at random, so that a passage is rarely
    tokenised the same way twice; the last readings are tokenised as in inference."""
    rng = random.Random(f"{seed} {epoch}")
    stream = []
    heads = []
    alpha = plan.respell if epoch < plan.epochs * (1 - CANONICAL) else 0.0

    def spell(text):
        a = alpha * rng.choice((0, 1, 1, 2))
        if a == 0.0:
            return data.sp.encode(text)
        return data.sp.encode(text, enable_sampling=True, alpha=a, nbest_size=-1)

    for section in rng.sample(data.books, len(data.books)):
        heads.append(len(stream) + 1)
        stream += document(rng, section, data.sp, spell)
    return np.array(stream, dtype=np.uint16), heads


def epochs(data, plan, seed):
    """The epochs' token streams, made ahead by worker processes: tokenising one takes as long as
    training on it."""
    workers = max(1, min(6, plan.epochs, (os.cpu_count() or 2) // 3))

    def work(w):
        os.nice(10)
        spm.set_random_generator_seed(seed * 1000 + w)
        for epoch in range(w, plan.epochs, workers):
            queues[w].put(encode_epoch(data, plan, epoch, seed))

    context = multiprocessing.get_context("fork")
    queues = [context.Queue(maxsize=1) for _ in range(workers)]
    for w in range(workers):
        context.Process(target=work, args=(w,), daemon=True).start()
    return (queues[epoch % workers].get(timeout=900) for epoch in range(plan.epochs))


def train_tokenizer(books, path, vocab):
    """Llama 2's settings: BPE, byte fallback (a line break is <0x0A>), single digits, no
    normalisation. The chat's markers are repeated often enough that '[INST]' is three tokens and
    not six."""
    lines = [line for s in books for line in f"{s.headings}\n{s.body}".split("\n") if line]
    lines += ["[INST] <<SYS>> <</SYS>> [/INST]"] * (len(lines) // 40)
    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        model_type="bpe",
        vocab_size=vocab,
        byte_fallback=True,
        character_coverage=0.99995,
        split_digits=True,
        unk_id=UNK,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        max_sentence_length=1 << 20,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path.write_bytes(written.getvalue())
