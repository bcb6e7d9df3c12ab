"""A checkpoint does not continue as another run of the same shapes. Other layouts of the same run
are not refused.    pytest tests/checkpoint/test_identity.py
"""

import json
import re
import shutil
from dataclasses import replace

from harness.inputs import change_json, read_config, rewrite, strategy, write_rows
from harness.runs import checkpoints, read_metrics
from transformers import AutoConfig

from zerotrain.checkpoint.start import check_resumable
from zerotrain.checkpoint.state import RunIdentity, read_state
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.machine import Machine
from zerotrain.tools.open_plans import open_plans
from zerotrain.tools.small_config import small_config
from zerotrain.training.setup import open_run


def new_run(line, folder):
    """The flags that a line names to start a new run from the weights, in a different folder."""
    named = re.search(r"in another output_dir \(from its weights: (.*?);", line)[1]
    return *named.split(), "--output_dir", folder


def test_another_rule_of_adam_is_refused_and_another_implementation_is_not(
    forks, tiny_config, tmp_path
):
    config = tiny_config(train__steps=1)

    def optimizer(**changes):
        paths = {f"optimizer.{key.replace('__', '.')}": value for key, value in changes.items()}
        return "--ds_config", strategy(tmp_path, "zero2", paths)

    forks.finish(config, *optimizer(params__eps=1e-6))
    coupled = {"params__eps": 1e-6, "type": "Adam", "params__adam_w_mode": False}
    for key, was, now, changes in (
        ("eps", "1e-06", "1e-08", {}),
        ("adam_w_mode", "true", "false", coupled),
    ):
        line = forks.refusal(config, "--dry_run", *(flags := optimizer(**changes)))
        assert UserError(line).key == "ds_config"
        assert f"optimizer.params.{key}: is {now}, but the checkpoint has {was}; restore" in line
    forks.finish(config, "--dry_run", *flags, *new_run(line, tmp_path / "new"))
    for changes in (
        {"type": "Adam", "params__foreach": True, "params__torch_adam": False},
        {"params__fused": True, "params__adam_w_mode": False},
    ):
        flags = optimizer(params__eps=1e-6, **changes)
        assert "resuming from" in forks.finish(config, "--dry_run", *flags).output


OTHER_CONFIGS = (
    {"rms_norm_eps": 0.1}, {"hidden_act": "gelu"}, {"attention_dropout": 0.5},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
    {"model_type": "mistral", "sliding_window": 8},
)  # fmt: skip
"""Changes of the tiny Llama's config.json that leave the shapes of all weights as they are."""
SAME_CONFIG = {
    "transformers_version": "4.57.0", "dtype": "bfloat16", "use_cache": False,
    "eos_token_id": [1, 2], "architectures": None, "of_another_version": 1,
}  # fmt: skip


def test_another_config_json_of_the_same_shapes_is_refused(
    forks, tiny_config, tmp_path, tiny_model
):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = tiny_config(train__steps=1, model=model)
    forks.finish(config)
    for changes in OTHER_CONFIGS:
        shutil.copy(tiny_model / "config.json", model)
        change_json(model / "config.json", **changes)
        line = forks.refusal(config, "--dry_run")
        assert UserError(line).key == "model.name_or_path" and "; restore it, or" in line
        key, now, was = re.search(
            r": (\w+) is (.*) in config.json, but .* has (.*?);", line
        ).groups()
        assert key in changes and json.loads(now) != json.loads(was)
    forks.finish(config, "--dry_run", *new_run(line, tmp_path / "new"))
    shutil.copy(tiny_model / "config.json", model)
    change_json(model / "config.json", **SAME_CONFIG)
    model.rename(tmp_path / "moved")
    output = forks.finish(config, "--model.name_or_path", tmp_path / "moved", "--dry_run").output
    assert "resuming from" in output and "name_or_path: is" not in output


def test_another_first_held_out_set_begins_a_new_best(forks, tiny_config, tmp_path, chat_rows):
    """The other sets do not decide which checkpoint is best. A set may be renamed."""
    other = write_rows(tmp_path / "other.jsonl", chat_rows[40:44])
    first, run_folder = tmp_path / "eval.jsonl", tmp_path / "run"
    config = tiny_config(
        train__steps=1, data__eval_sources={"a": [first], "b": [other]}, eval__every_steps=1,
        checkpoint={"keep_best": True, "keep_last": 9},
    )  # fmt: skip
    forks.finish(config)

    def verify(out):
        args = checkpoints(run_folder)[0], tmp_path / out, "--verify"
        return forks.script("scripts.export", *args, code=0).output

    def resumed(steps, **sets):
        given = json.dumps({name: [str(path)] for name, path in sets.items()})
        flags = "--train.steps", steps, "--data.eval_sources", given
        output = forks.finish(config, *flags).output
        return output, read_state(checkpoints(run_folder)[-1]).progress

    last = read_state(checkpoints(run_folder)[-1]).progress
    output, progress = resumed(2, renamed=first, b=first)
    assert "held-out set b" in output and "first held-out set" not in output
    assert progress.best.value <= last.best.value
    output, progress = resumed(3, renamed=other)
    assert "the first held-out set has changed" in output and "held-out set renamed" in output
    found = {e["step"]: e["eval_loss"] for e in read_metrics(run_folder, "eval")[-2:]}
    assert [*found] == [2, 3], "the new set is evaluated where the run resumes, too"
    assert progress.best.value == min(found.values())
    # A checkpoint from before the change is compared with its own set, if the run still has it.
    assert "not compared" in verify("first")
    assert "has changed" not in resumed(4, renamed=other, c=first)[0]
    assert f"the run's: {last.eval_loss:.6f}" in verify("second")


def test_a_checkpoint_without_the_newer_facts_resumes_with_its_best(
    forks, tiny_config, tmp_path, chat_rows
):
    config = tiny_config(train__steps=1)
    forks.finish(config)
    [checkpoint] = checkpoints(tmp_path / "run")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    for name in ("model", "model_config", "held_out"):
        del state["run"][name]
    settings = state["run"]["settings"]
    for key in [key for key in settings if key.startswith("ds_config")]:
        del settings[key]
    rewrite(checkpoint, "trainer_state.json", json.dumps(state).encode())
    other = write_rows(tmp_path / "other.jsonl", chat_rows[40:44])
    flags = "--train.steps", 2, "--data.eval_sources", f"[{other}]"
    ds_config = strategy(tmp_path, "zero2", {"optimizer.params.eps": 1e-6})
    output = forks.finish(config, *flags, "--ds_config", ds_config).output
    assert "resuming from" in output and "held-out set has changed" not in output
    assert read_state(checkpoints(tmp_path / "run")[-1]).progress.best is not None


def test_a_checkpoint_that_decayed_biases_of_experts_resumes_with_a_line(
    tiny_config, tmp_path, sample_tokenizer, capsys
):
    """Earlier versions decayed every matrix; two layers of gpt-oss have biases of experts."""
    model = small_config(AutoConfig.for_model("gpt_oss"))
    special = {f"{kind}_token_id": None for kind in ("bos", "eos", "pad")}
    model.update({"vocab_size": len(sample_tokenizer), **special})
    model.save_pretrained(tmp_path / "model")
    sample_tokenizer.save_pretrained(tmp_path / "model")
    config = read_config(tiny_config(model=tmp_path / "model", model__from_config=True))
    setup, _ = open_run(config, Machine(1, 1))
    now = RunIdentity.of(setup, open_plans(config, 1)[2], {})
    for spared, weight_decay, said in ((None, 0.1, True), (4, 0.1, False), (None, 0.0, False)):
        now.settings["train.weight_decay"] = weight_decay
        check_resumable(tmp_path, replace(now, spared=spared), now, False)
        assert ("no longer applies to 4 tensors" in capsys.readouterr().err) == said
