"""Load the tokenizer."""

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from zerotrain.config.schema import ModelConfig
from zerotrain.model.hub import NO_TOKENIZER, load_pretrained
from zerotrain.runtime.errors import UserError


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The run's tokenizer, which neither pads nor truncates, with the chat template of its files.

    Raises:
        UserError: it cannot be loaded, or cannot tell which characters its tokens are from.
    """
    source = config.tokenizer or config.name_or_path
    tokenizer = load_pretrained(
        AutoTokenizer.from_pretrained,
        source,
        "model.tokenizer" if config.tokenizer else "model.name_or_path",
        config.trust_remote_code,
    )
    if len(tokenizer.get_vocab()) == len(tokenizer.added_tokens_decoder):  # made from no files
        raise UserError(f"cannot load the tokenizer of {source}: {NO_TOKENIZER}")
    if not tokenizer.is_fast:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path} has no tokenizer.json, which maps answers to "
            "tokens; set model.tokenizer to a folder that has one"
        )
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    return tokenizer
