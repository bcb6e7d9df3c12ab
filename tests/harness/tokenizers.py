"""Small tokenizers of the kinds that models have."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "▁"  # SentencePiece's, for a space
KINDS = {
    "Llama 2, Phi-3": {
        "normalizer": normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
    },
    "Mistral": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first", split=False)},
    "TinyLlama": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always", split=True)},
    "GPT-2": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)},
    "without words": {
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    },
    "RoBERTa": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
}
"""Parts of a tokenizer. Half of them put a space before every text."""


def small_tokenizer(kind, merges=("(s", " y", " A")):
    """A tokenizer of bytes, with bos before every text, and a token for each of the merges."""
    parts = KINDS[kind]
    is_bytes = isinstance(parts.get("pre_tokenizer"), pre_tokenizers.ByteLevel)
    space = "Ġ" if is_bytes else SPACE
    if is_bytes:
        words = sorted(pre_tokenizers.ByteLevel.alphabet())
        decoder = decoders.ByteLevel()
    else:
        words = [*BYTES, space, *map(chr, range(33, 127))]
        strip = decoders.Strip(" ", 1, 0)  # the space that was put before the text
        decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), strip]
        )
    merges = [merge.replace(" ", space) for merge in merges]
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", *words, *merges])}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [tuple(merge) for merge in merges], byte_fallback=not is_bytes)
    )
    tokenizer.decoder = decoder
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
