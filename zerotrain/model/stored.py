"""The fp32 weights in a model's files, by the names that they have in the model."""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.integrations.deepspeed import _apply_weight_conversions_to_state_dict
from transformers.modeling_utils import load_state_dict

from zerotrain.model.hub import weight_files


def fp32_weights(
    skeleton: nn.Module, source: str, device: str = "cpu", download: bool = True
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the parameters that a model's files have in fp32, some at a time.

    transformers renames the tensors of the files while it loads them, and fuses or splits some,
    e.g. the experts of a mixture. What it leaves as it is stays mapped from the files.

    Args:
        skeleton: the model on the meta device, without adapters.
        source: model.name_or_path.
        device: cpu; or meta, for names and shapes alone.
        download: download files that are not in the hub's cache.

    Raises:
        UserError: the files are not here, and cannot be downloaded.
    """
    stored = {}
    for file in weight_files(source, download):
        stored |= load_state_dict(file, device)
    if all(tensor.dtype != torch.float32 for tensor in stored.values()):
        return
    first = {}  # Tied weights have several names, of which named_parameters() gives the first.
    own = {
        name: first.setdefault(p, name)
        for name, p in skeleton.named_parameters(remove_duplicate=False)
    }
    conversions = get_model_conversion_mapping(skeleton)
    converted = _apply_weight_conversions_to_state_dict(
        skeleton, dict(sorted(stored.items())), conversions
    )
    # Last, the files' names, in case a conversion is for older files of the same type.
    for weights in chain(converted, [stored]):
        yield {
            own[name]: tensor
            for name, tensor in weights.items()
            if name in own and tensor.dtype == torch.float32
        }
