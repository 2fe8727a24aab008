"""Small tokenizers of different make: a prompt's length has to be exact with each."""

from __future__ import annotations

from typing import Any

CORPUS = [
    "The pass key is 1234567. Remember it, the river and the old clerk in the rain.",
    '{"9c8d67c2-7e24-40e5-8b7b-88d5302d4b79": "f1da5515-2eda-4623-ae70-b5782ce6da8c",'
    '\n "ab": "cd"}',
    "There is an important info hidden inside a lot of irrelevant text. What is the key? "
    "Corresponding value:",
]


def byte_level(*, bos: bool = False, eos: bool = False) -> Any:
    """BPE over bytes, with or without tokens that it adds itself."""
    from tokenizers import decoders, pre_tokenizers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    template = f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}"
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return _trained(split, decoders.ByteLevel(), split.alphabet(), template, special)


def metaspace() -> Any:
    """BPE in SentencePiece's manner: a space before every text, and a BOS."""
    from tokenizers import decoders, pre_tokenizers

    split = pre_tokenizers.Metaspace(prepend_scheme="always")
    alphabet = sorted({chr(code) for code in range(32, 127)} | {"\n", "▁"})
    special = {"unk_token": "<unk>", "bos_token": "<s>"}
    return _trained(split, decoders.Metaspace(), alphabet, "<s> $A", special)


def _trained(
    split: Any, decoder: Any, alphabet: list[str], template: str, special: dict[str, str]
) -> Any:
    from tokenizers import Tokenizer, models, processors, trainers
    from transformers import PreTrainedTokenizerFast

    names = list(special.values())
    inner = Tokenizer(models.BPE(unk_token=special.get("unk_token")))
    inner.pre_tokenizer = split
    inner.decoder = decoder
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=names, initial_alphabet=alphabet)
    inner.train_from_iterator(CORPUS, trainer)
    numbers = [(name, number) for number, name in enumerate(names)]
    inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=numbers)
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


MAKERS = {
    "bytes": byte_level,
    "bytes with bos": lambda: byte_level(bos=True),
    "bytes with bos and eos": lambda: byte_level(bos=True, eos=True),
    "metaspace": metaspace,
}
