"""The names of tensors in a model's files, where transformers does not give them back by itself.

Loading takes prefixes off names, or adds them: Gemma 3's files have a `vision_model.` after
`vision_tower.`, its model has not. Saving gives them back to a model that was loaded, but not to
one that was made from its config, as an export is; other programs then do not find the tensors.
"""

from collections.abc import Collection

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange


def changed_prefixes(model: nn.Module) -> list[str]:
    """The changes of prefixes that the files of a model needed when it was loaded."""
    changes = getattr(model, "_weight_conversions", None) or []
    return [_describe(c) for c in changes if isinstance(c, PrefixChange) and c.was_used()]


def give_back_prefixes(model: nn.Module, changed: Collection[str]) -> None:
    """Have `save_pretrained` of a model that was not loaded write the names that its files had.

    Args:
        changed: changed_prefixes of the model that was loaded from them.
    """
    if changed:
        known = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [
            c for c in known if not isinstance(c, PrefixChange) or _describe(c) in changed
        ]


def _describe(change: PrefixChange) -> str:
    return f"{change.scope_prefix or ''}: {change.source_patterns} -> {change.target_patterns}"
