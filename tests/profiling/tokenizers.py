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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    inner.train_from_iterator(CORPUS, trainer)
    single = f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}"
    specials = [("<s>", 0), ("</s>", 1)]
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def metaspace() -> Any:
    """BPE in SentencePiece's manner: a space before every text, and a BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Metaspace()
    alphabet = sorted({chr(code) for code in range(32, 127)} | {"\n", "▁"})
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>"], initial_alphabet=alphabet
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="<unk>")


MAKERS = {
    "bytes": byte_level,
    "bytes with bos": lambda: byte_level(bos=True),
    "bytes with bos and eos": lambda: byte_level(bos=True, eos=True),
    "metaspace": metaspace,
}
