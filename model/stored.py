"""The pretrained weights in a model's files, read without the loader that training uses."""

import re
from collections.abc import Collection, Iterator
from copy import deepcopy
from functools import partial

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from model.base import weight_files
from runtime.errors import UserError

WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+)(?=\.)")
"""What peft puts into the names of the weights that it keeps or copies."""


class StoredWeights:
    """The tensors in the files of a pretrained model, read one at a time."""

    def __init__(self, name: str, revision: str | None) -> None:
        """Raises UserError: there are no such files."""
        self.files = weight_files(name, revision)
        if not self.files:
            raise UserError(f"model.name_or_path: {name} has no files of weights")
        self.bytes = sum(file.stat().st_size for file in self.files)
        self._readers = {}
        for file in self.files:
            if file.suffix == ".safetensors":
                reader = safe_open(file, framework="pt")
                self._readers |= {key: partial(reader.get_tensor, key) for key in reader.keys()}  # noqa: SIM118
            else:
                stored = torch.load(file, mmap=True, weights_only=True, map_location="cpu")
                self._readers |= {key: partial(stored.get, key) for key in stored}

    def expected(
        self, model: nn.Module, share: slice, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name without adapters, value) of a share of the tensors, converted as transformers does.

        Args:
            model: on any device, partitioned or not.
            share: of the tensors in their order, e.g. slice(rank, None, world_size).
            names: only these; default: all.
        """
        conversions = getattr(model, "_weight_conversions", None) or []
        renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        by_pattern = {source: c for c in converters for source in c.source_patterns}
        prefix = model.base_model_prefix
        known = {WRAPPERS.sub("", name): value for name, value in model.state_dict().items()}
        groups: dict[str, WeightRenaming | WeightConverter] = {}
        for key in sorted(self._readers, key=dot_natural_key):
            name, source = rename_source_key(key, renamings, converters, prefix, known)
            if name not in known and key in known:
                name, source = key, None
            if name not in (known if names is None else names):
                continue
            if source is None:
                groups[name], source = WeightRenaming(key, name), key
            elif name not in groups:
                groups[name] = deepcopy(by_pattern[source])
            groups[name].add_tensor(name, key, source, self._readers[key])
        for name, group in list(groups.items())[share]:
            for target, value in group.convert(name, model=model, config=model.config).items():
                yield target, value[0] if isinstance(value, list) else value


def check_ties(name: str, revision: str | None, model: PreTrainedModel) -> None:
    """Refuse a config.json that ties an output head to the embeddings where the files have a head
    of its own. transformers then trains that head, but under ZeRO-3 the embeddings in its place,
    and servers do either.

    Args:
        model: of these files, on any device.

    Raises:
        UserError: names the two tensors.
    """
    stored, ties = StoredWeights(name, revision), model.all_tied_weights_keys
    values = dict(stored.expected(model, slice(None), {*ties, *ties.values()}))
    for head, embeddings in ties.items():
        if not {head, embeddings} <= values.keys():
            continue
        if not torch.equal(values[head].float(), values[embeddings].float()):
            raise UserError(
                f"model.name_or_path: {name}: its config.json ties {head} to {embeddings}, but "
                'they differ in its files; set "tie_word_embeddings": false there to keep both, or '
                f"remove {head} from the files"
            )
