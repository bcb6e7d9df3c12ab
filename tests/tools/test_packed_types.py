"""Every causal model type of transformers, batching auto.
pytest tests/tools/test_packed_types.py"""

import copy
from contextlib import suppress

import torch
from harness.inputs import read_config
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zerotrain.model.architecture import meta_model
from zerotrain.model.packing import PACKED_EXAMPLES, resolve_batching
from zerotrain.model.probes import check_causal, check_packing
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.machine import Machine
from zerotrain.tools.equivalence import small_config

torch.set_num_threads(1)  # for models this small, threads cost more than they save


def small_models():
    """{type: a small model} of each causal model of transformers that its default config makes,
    with a sliding window where the type has one.
    """
    found = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        for sizes in ({}, {"head_dim": 8, "num_key_value_heads": 2}):
            with suppress(Exception):  # a model's own code can raise anything
                config = small_config(AutoConfig.for_model(kind, **sizes))
                text = config.get_text_config()
                text.vocab_size, text.pad_token_id = 320, None
                for key, value in {"sliding_window": 5, "vocab_size_per_layer_input": 320}.items():
                    if hasattr(text, key):
                        setattr(text, key, value)
                torch.manual_seed(0)
                found[kind] = AutoModelForCausalLM.from_config(config)
                break
    return found


def test_auto_packs_no_type_of_model_wrongly(tiny_config):
    """A type that neither its config nor its class tells apart is refused by the probe."""
    run = read_config(tiny_config())
    packed, refused = [], []
    for kind, model in small_models().items():
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.1)
        try:
            check_causal(model, range(3, 320))
        except (UserError, RuntimeError, AttributeError):  # an encoder; sizes that do not fit
            continue
        try:
            skeleton = meta_model(copy.deepcopy(model.config), False)
            batching = resolve_batching(run, skeleton, Machine(1, 1))[0].data.batching
        except UserError:  # one part of several
            continue
        if batching == "packed":
            model.set_attn_implementation(PACKED_EXAMPLES)
            try:
                check_packing(model, range(3, 320))
                packed.append(kind)
            except UserError:
                refused.append(kind)
    assert len(packed) > 75 and refused == ["doge"], packed
