"""The parts of libraries that this repository uses although they are not public.
pytest tests/repository/test_internals.py

Another version may rename them or change what they mean. Before an upgrade, compare each of them
with the new version, run the tests, and then change READ_FROM.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
import transformers
from harness.repository import REPO
from torch import nn

READ_FROM = {
    "deepspeed": "0.19.8", "torch": "2.13", "transformers": "5.24", "datasets": "5.2",
    "wandb": "0.31",
}  # fmt: skip

PATCHES = {
    "zerotrain/runtime/process_group.py: __compatible_ops__": "on CPU, gloo instead of a "
    "shared-memory all-reduce, which needs a compiler and leaves 69 MB per rank in /dev/shm",
    "zerotrain/model/load.py: _original_object_hash": "a generation config with other end tokens "
    "is saved as if unchanged, since transformers refuses to save what many models publish",
    "zerotrain/training/engine.py: first_dataloader_check": "removed under tensor parallelism, "
    "where it would send each rank's inputs to the others as pickles",
    "zerotrain/training/guard.py: averaged_gradients": "cleared after an update that ZeRO 2 "
    "with offload has skipped, since the next gradients would be added to NaN",
    "zerotrain/model/load.py: _from_model_config": "the same config no longer follows from "
    "config.json",
}
"""FILE: ATTRIBUTE of a library's object that is changed, and why; at most five."""

INTERNALS = {
    "train.py": """
        deepspeed.runtime.engine: basic_optimizer
    """,
    "zerotrain/config/ds_config.py": """
        deepspeed.ops.op_builder.async_io: AsyncIOBuilder
        deepspeed.runtime.config_utils: dict_raise_error_on_duplicate_keys
        deepspeed.runtime.zero.config: DeepSpeedZeroConfig
    """,
    "zerotrain/runtime/hang.py": """
        torch.distributed.distributed_c10d: _distributed_c10d
    """,
    "zerotrain/runtime/process_group.py": """
        deepspeed.ops: __compatible_ops__
        torch.distributed.distributed_c10d: _world pg_map _set_pg_timeout
    """,
    "zerotrain/runtime/preemption.py": """
        deepspeed.launcher.launch: CROSS_SIZE
    """,
    "zerotrain/checkpoint/zero_state.py": """
        deepspeed.runtime.engine: basic_optimizer
        deepspeed.checkpoint.constants: DS_AUTOTP_UC_META
        deepspeed.checkpoint.affine: AffinePiece ParamAffineMap
        deepspeed.module_inject.layers: partition_dim affine_map DS_TENSOR_MODEL_PARALLEL
        deepspeed.runtime.zero.stage3: fp16_groups fp32_partitioned_groups_flat ds_tensor
            checkpoint_event_prologue checkpoint_event_epilogue optimizer_swapper
        deepspeed.runtime.swap_tensor.optimizer_utils: swap_params_info get_swap_paths
        deepspeed.runtime.zero.partition_parameters: ds_shape ds_numel
        deepspeed.runtime.zero.stage_1_and_2: update_lp_params
        deepspeed.utils.tensor_fragment: hp_fragment_address lp_fragment_address
            param_group_index
        deepspeed.runtime.fp16.loss_scaler: cur_scale cur_iter last_overflow_iter
            cur_hysteresis
        deepspeed.utils.mixed_precision_linkage: _hp_mapping
        deepspeed.runtime.fp16.fused_optimizer: fp16_groups
        deepspeed.runtime.fp16.unfused_optimizer: fp16_groups
    """,
    "zerotrain/checkpoint/save.py": """
        torch.utils._pytree: tree_map_only
    """,
    "zerotrain/rows/sources.py": """
        datasets.arrow_dataset: _fingerprint
    """,
    "zerotrain/rows/tokenize.py": """
        concurrent.futures.process: _call_queue _reader
    """,
    "zerotrain/rows/turns.py": """
        transformers.utils.chat_template_utils: render_jinja_template
    """,
    "zerotrain/launch/hostfile.py": """
        deepspeed.launcher.runner: parse_inclusion_exclusion
    """,
    "zerotrain/tracking/wandb.py": """
        wandb.cli.beta: core
        wandb.sdk.wandb_settings: x_transaction_log_flush_interval
    """,
    "zerotrain/model/hub.py": """
        transformers.utils.hub: _raise_exceptions_for_missing_entries get_checkpoint_shard_files
    """,
    "zerotrain/model/stored.py": """
        transformers.conversion_mapping: get_model_conversion_mapping
        transformers.integrations.deepspeed: _apply_weight_conversions_to_state_dict
        transformers.modeling_utils: load_state_dict
    """,
    "zerotrain/model/load.py": """
        transformers.modeling_utils: _keys_to_ignore_on_load_unexpected load_state_dict
            get_expanded_tied_weights_keys
        transformers.generation.configuration_utils: _from_model_config _original_object_hash
    """,
    "zerotrain/model/packing.py": """
        transformers.modeling_utils: _supports_sdpa
        transformers.masking_utils: eager_mask
        transformers.integrations.sdpa_attention: sdpa_attention_forward
        deepspeed.sequence.layer: DistributedAttention
    """,
    "zerotrain/model/partitions.py": """
        deepspeed.runtime.zero.partition_parameters: ds_tensor ds_numel ds_process_group
    """,
    "zerotrain/model/architecture.py": """
        transformers.configuration_utils: _attn_implementation
    """,
    "zerotrain/model/probes.py": """
        transformers.configuration_utils: _attn_implementation
    """,
    "zerotrain/training/engine.py": """
        deepspeed.runtime.engine: basic_optimizer first_dataloader_check
        transformers.modeling_utils: _set_gradient_checkpointing
    """,
    "zerotrain/training/loss.py": """
        deepspeed.runtime.chunked_cross_entropy: chunked_cross_entropy
    """,
    "zerotrain/training/guard.py": """
        deepspeed.runtime.fp16.loss_scaler: cur_scale min_scale
        deepspeed.runtime.engine: basic_optimizer
        deepspeed.runtime.zero.stage_1_and_2: averaged_gradients cpu_offload _global_grad_norm
    """,
    "zerotrain/training/optimizer.py": """
        deepspeed.runtime.zero.partition_parameters: ds_shape
    """,
}
"""FILE -> a library's module: the names that the file takes from it."""

DESCRIBED = """
    can_generate dequantize device dtype enable_input_require_grads from_pretrained get_decoder
    activation_checkpointing_enable get_input_embeddings get_output_embeddings save_pretrained
    set_attn_implementation tie_weights
"""
"""Methods of models that transformers' pages describe."""
UNDESCRIBED = {*dir(transformers.PreTrainedModel)} - {*dir(nn.Module), *DESCRIBED.split()}
UNDESCRIBED |= {name for text in INTERNALS.values() for name in text.split() if name[-1] != ":"}
"""Their other methods, and what one of our files lists; every file that uses it must list it."""
WANDB = re.compile(r'\b(x_\w+)=|"beta", "(\w+)"')
"""Settings and commands that W&B calls private or beta."""
CHANGED_ANYWHERE = {"forward", "step", "backward", "checkpoint_engine"}
FILES = [REPO / "train.py", *sorted((REPO / "zerotrain").rglob("*.py"))]


def entries(file: str) -> dict[str, list[str]]:
    """A library's module -> names, of a file of ours."""
    parts = re.split(r"(\S+): ", INTERNALS[file])[1:]
    return {module: names.split() for module, names in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.parametrize("file", [f for f in INTERNALS if (REPO / f).exists()])
def test_every_listed_name_is_used_here_and_exists_in_the_library(file):
    here = (REPO / file).read_text()
    for module, names in entries(file).items():
        library = Path(importlib.util.find_spec(module).origin).read_text()
        for name in names:
            assert re.search(rf"\b{name}\b", here), f"{name}: not used, remove it from the list"
            assert re.search(rf"\b{name}\b", library), f"{name}: not in the installed {module}"


@cache
def offered(library: str) -> set[str]:
    """The names at the top of a library. transformers takes 0.2 s to list its own."""
    return {*dir(importlib.import_module(library))}


def is_public(module: str, name: str) -> bool:
    """Whether a library offers a name of a module: in the module's `__all__`, at the top, or in a
    package right below the top.
    """
    root, *below = module.split(".")
    if root not in READ_FROM or name in offered(root):
        return True
    found = importlib.import_module(module)
    is_package = len(below) < 2 and hasattr(found, "__path__")
    return "._" not in module and (is_package or name in getattr(found, "__all__", ()))


def private_names(text: str) -> set[str]:
    """The names in a file of ours that libraries do not offer, as far as rules can tell."""
    names = {match[1] or match[2] for match in WANDB.finditer(text)}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ImportFrom():
                names |= {a.name for a in node.names if not is_public(node.module, a.name)}
            case ast.Attribute(value=ast.Name("self" | "cls" | "sys" | "os")):
                pass
            case ast.Attribute(attr=name) if name in UNDESCRIBED or re.match("_[a-z]", name):
                names.add(name)
    return names


def changed_attributes(text: str, listed: set[str]) -> set[str]:
    """The attributes of libraries' objects that a file assigns or deletes: of a module, with a
    private name, in the list, or a method of engines and models. And listed ones that it clears.
    """
    tree = ast.parse(text)
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = {(a.asname or a.name).split(".")[0] for node in imports for a in node.names}
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets) | ast.Delete(targets):
                names, roots = listed | CHANGED_ANYWHERE, modules
            case ast.Call(ast.Attribute(target, "clear" | "remove")):
                targets, names, roots = [target], listed, ()
            case _:
                continue
        for target in targets:
            while isinstance(target, ast.Subscript):
                target = target.value
            match target:
                case ast.Attribute(ast.Name("self"), _) | ast.Attribute(_, "environ"):
                    pass
                case ast.Attribute(where) if ast.unparse(where) == "torch.compiler.config":
                    pass  # settings, and public
                case ast.Attribute(_, name):
                    root = ast.unparse(target).split(".")[0]
                    if name in names or root in roots or name.startswith("_"):
                        found.add(name)
    return found


def test_private_names_and_patches_are_listed():
    changed = set()
    for file in FILES:
        name, text = str(file.relative_to(REPO)), file.read_text()
        listed = {*INTERNALS.get(name, "").split()}
        changed |= {f"{name}: {attribute}" for attribute in changed_attributes(text, listed)}
        assert private_names(text) <= listed, name
    assert changed == PATCHES.keys() and len(PATCHES) <= 5


@pytest.mark.parametrize("text, name", [
    ("from transformers.modeling_utils import load_state_dict", "load_state_dict"),
    ("from torch.utils._pytree import tree_map_only", "tree_map_only"),
    ("model.get_expanded_tied_weights_keys()", "get_expanded_tied_weights_keys"),
    ("wandb.Settings(x_label=1)", "x_label"),
    ('["wandb", "beta", "core"]', "core"),
    ("model._is_stateful", "_is_stateful"),
    ("engine.basic_optimizer", "basic_optimizer"),
])  # fmt: skip
def test_each_kind_of_private_name_is_found(text, name):
    assert private_names(text) == {name}
    assert not private_names("from transformers import AutoConfig\nmodel.tie_weights()")


@pytest.mark.parametrize(
    "text",
    [
        "import warnings\nwarnings.showwarning = print",
        "generation._original_object_hash = 1",
        "engine.first_dataloader_check.remove()",
        "engine.optimizer.averaged_gradients.clear()",
        "import deepspeed\ndeepspeed.ops.__compatible_ops__['x'] = False",
        "model.lm_head.forward = print",
    ],
)
def test_each_kind_of_patch_is_found(text):
    assert changed_attributes(text, {"first_dataloader_check", "averaged_gradients"})


def test_the_list_is_of_the_installed_versions():
    for name, read in READ_FROM.items():
        assert f"{version(name)}.".replace("+", ".").startswith(f"{read}."), name


# --------------------------------------------------------------------------------------------------
# Other versions of torch

LACKING = """
import importlib, inspect, json, sys

def find(name):
    module, dot, attribute = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(error.name):
            raise
        return getattr(find(module), attribute)

for name, keywords in json.load(sys.stdin):
    try:
        known = inspect.signature(find(name)).parameters
    except AttributeError:
        print(name)
    except (ImportError, TypeError, ValueError):
        pass  # needs another package, is not a function, or is written in C++
    else:
        if all(p.kind != p.VAR_KEYWORD for p in known.values()):
            print(end="".join(f"{name}({k}=)\\n" for k in keywords if k not in known))
"""


def torch_calls(text: str) -> Iterator[tuple[str, list[str]]]:
    """What a file of ours calls of torch, and the keywords of each call."""
    tree = ast.parse(text)
    origin = {"block.compile": "torch.compile", "torch": "torch", "dist": "torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            origin |= {a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            root, *rest = [name] if name in origin else name.split(".")
            name = ".".join([origin.get(root, ""), *rest])
            if re.fullmatch(r"torch(\.\w+)+", name):
                yield name, [k.arg for k in node.keywords if k.arg]


@pytest.mark.parametrize("python", [sys.executable, *os.environ.get("OTHER_TORCH", "").split()])
def test_torch_has_what_is_used_of_it(python):
    """OTHER_TORCH has the Python programs of environments with other versions."""
    used = [call for file in FILES for call in torch_calls(file.read_text())]
    assert ("torch.compile", ["dynamic"]) in used
    used.append(("torch.compiler.config.recompile_limit", []))
    done = subprocess.run(
        [python, "-c", LACKING], input=json.dumps(used), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
