"""Owns: a recipe's texts as tokens: a byte-level BPE learnt on what is trained on, an array a topic, on disk."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from laya.errors import ConfigError
from laya.training.recipe import Recipe
from laya.training.sources import Document, Fetched, fetch, folder_contents

END = "<|endoftext|>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}\n\n{% endif %}{% endfor %}"
"""The model only continues text: what was said is put one after the other."""
_MOST_LEARNT_CHARS = 3_000_000  # of a topic: merges hardly change beyond it


class Corpus(msgspec.Struct, frozen=True, kw_only=True):
    """Where a recipe's tokens are (`<topic>.train.npy`, `<topic>.held_out.npy`: uint16), and what they are of."""

    folder: str
    topics: list[str]
    fetched: list[Fetched]
    n_documents: dict[str, int]
    n_held_out_documents: dict[str, int]

    def tokens(self, topic: str, part: str) -> NDArray[np.uint16]:
        """part: train or held_out. Mapped from disk, not read."""
        array: NDArray[np.uint16] = np.load(Path(self.folder, f"{topic}.{part}.npy"), mmap_mode="r")
        return array

    def check_lengths(self, sequence_tokens: int) -> None:
        """Raises ConfigError for a topic that has not one sequence to learn, or to look at."""
        for topic in self.topics:
            for part in ("train", "held_out"):
                if (n_tokens := len(self.tokens(topic, part))) < sequence_tokens:
                    raise ConfigError(
                        f"topic {topic}: {n_tokens} tokens ({part}), fewer than train.sequence_tokens {sequence_tokens}"
                    )

    @property
    def tokenizer_dir(self) -> Path:
        return Path(self.folder, "tokenizer")


def prepare(recipe: Recipe, cache: Path, tell: Callable[[str], None]) -> Corpus:
    """Made once for a recipe's sources and what lies in their folders, and found again; by one process at a time.

    Raises as `sources.fetch`, and ConfigError for a vocabulary that the texts do not give.
    """
    with _alone(cache, tell):
        key, contents = recipe.data_key, folder_contents(recipe)
        if contents:
            key = hashlib.sha256(f"{key}{contents}".encode()).hexdigest()[:16]
        folder = cache / f"{recipe.name.removesuffix('-dense').removesuffix('-unbalanced')}-{key}"
        about = folder / "corpus.json"
        if about.is_file():
            return msgspec.structs.replace(msgspec.json.decode(about.read_bytes(), type=Corpus), folder=str(folder))
        shutil.rmtree(folder, ignore_errors=True)
        return _made(recipe, folder, cache, tell)


@contextmanager
def _alone(cache: Path, tell: Callable[[str], None]) -> Iterator[None]:
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--cache {cache}: no folder can be made there ({error.strerror}).") from None
    descriptor = os.open(cache, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"waiting for another process that prepares texts in {cache}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _made(recipe: Recipe, folder: Path, cache: Path, tell: Callable[[str], None]) -> Corpus:
    documents, fetched = fetch(recipe, cache / "packages", tell)
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        tell(f"tokenizer: {recipe.model.vocab_size} tokens")
        tokenizer = _learn(documents, recipe.model.vocab_size)
        _save(tokenizer, part / "tokenizer")
        for topic in recipe.topics:
            tell(f"{topic}: tokens")
            for is_held_out, name in ((False, "train"), (True, "held_out")):
                texts = [one.text for one in documents if one.topic == topic and one.is_held_out == is_held_out]
                np.save(part / f"{topic}.{name}.npy", _encode(tokenizer, texts))
        corpus = Corpus(
            folder=str(folder),
            topics=recipe.topics,
            fetched=fetched,
            n_documents={topic: sum(one.topic == topic for one in documents) for topic in recipe.topics},
            n_held_out_documents={
                topic: sum(one.topic == topic and one.is_held_out for one in documents) for topic in recipe.topics
            },
        )
        (part / "corpus.json").write_bytes(msgspec.json.encode(corpus))
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return corpus


def _learn(documents: Sequence[Document], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learnt: dict[str, int] = {}
    texts = []
    for one in sorted((one for one in documents if not one.is_held_out), key=lambda one: hash_order(one.name)):
        if learnt.get(one.topic, 0) < _MOST_LEARNT_CHARS:
            learnt[one.topic] = learnt.get(one.topic, 0) + len(one.text)
            texts.append(one.text)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise ConfigError(
            f"model.vocab_size is {vocab_size}, but the texts give no more than {tokenizer.get_vocab_size()} tokens"
        )
    return tokenizer


def hash_order(name: str) -> bytes:
    """A fixed order that has nothing to do with the alphabet's."""
    return hashlib.sha256(name.encode()).digest()


def _save(tokenizer: Tokenizer, folder: Path) -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END, unk_token=None)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> NDArray[np.uint16]:
    """One after the other, `END` before each."""
    end = tokenizer.token_to_id(END)
    pieces: list[NDArray[np.uint16]] = []
    for start in range(0, len(texts), 64):
        for one in tokenizer.encode_batch(list(texts[start : start + 64])):
            pieces.append(np.array([end, *one.ids], dtype=np.uint16))
    return np.concatenate(pieces)
