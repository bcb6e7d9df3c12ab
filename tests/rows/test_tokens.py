"""Rows that are tokens already: the same examples as from text, or a reason why not.
pytest tests/rows/test_tokens.py
"""

import copy
import json
import shutil
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from harness.cures import refused
from harness.inputs import write_rows

from zerotrain.config.schema import DataConfig, Source
from zerotrain.rows.messages import detect_format
from zerotrain.rows.render import cut_to_length, tokenize_row
from zerotrain.rows.sources import RawRow, parse_row, read_rows


def examples_of(rows, tokenizer, columns=None, **options):
    """(ids, weights) of each example that the raw rows become."""
    config = DataConfig(["rows"], **options)
    examples = []
    for raw in rows:
        row = parse_row(raw, columns or {})
        source = Source("rows", format=detect_format(row))
        tokens = tokenize_row(row, tokenizer, source, config)
        pieces, _ = cut_to_length(tokens.ids, tokens.weights, config)
        examples += [(ids.tolist(), weights.tolist()) for ids, weights in pieces]
    return examples


def example(row, tokenizer, **options):
    """The only example of a row, as (ids, weights)."""
    [found] = examples_of([RawRow("rows", 1, json.dumps(row))], tokenizer, **options)
    return found


def save(path, rows):
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".jsonl":
        write_rows(path, rows)
    elif path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    return read_rows(Source(path=str(path)))


TOO_LONG = [{"max_length": 40, "on_too_long": how} for how in ("truncate", "split", "drop")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_tokens_of_rendered_rows_give_the_same_examples(
    tmp_path, sample_tokenizer, chat_rows, name
):
    rows = [*chat_rows[:20], {"text": "1+1=2"}, {"prompt": "1+1=", "completion": "2"}]
    rows = [RawRow("rows", i, json.dumps(row)) for i, row in enumerate(rows)]
    tokens = examples_of(rows, sample_tokenizer)
    given = {
        "labels": [
            {"input_ids": ids, "labels": [i if m else -100 for i, m in zip(ids, mask, strict=True)]}
            for ids, mask in tokens
        ],
        "booleans": [{"input_ids": ids, "loss_mask": mask} for ids, mask in tokens],
        "numbers": [{"input_ids": ids, "loss_mask": [*map(int, mask)]} for ids, mask in tokens],
    }
    for kind, as_tokens in given.items():
        (tmp_path / kind).mkdir()
        found = [*save(tmp_path / kind / name, as_tokens)]
        for options in ({}, *TOO_LONG):
            expected = examples_of(rows, sample_tokenizer, **options)
            assert examples_of(found, sample_tokenizer, **options) == expected


IDS = [5, 6, 7, 8]
LABELS = [-100, -100, 7, 8]
LAST_TWO = [False, False, True, True]
SAME = yaml.safe_load("""
axolotl:
  labels: &labels [-100, -100, 7, 8]
  attention_mask: [1, 1, 1, 1]
  position_ids: [0, 1, 2, 3]
  length: 4
TRL: {completion_mask: [0, 0, 1, 1], seq_lengths: [4], text: any, messages: []}
masks that agree in two tokens: {completion_mask: [0, 1, 1, 1], assistant_masks: [1, 0, 1, 1]}
a mask and labels: {labels: [5, 6, 7, 8], loss_mask: [false, false, true, true]}
JSON in a string: {labels: "[-100, -100, 7, 8]"}
a tokenizer of sentence pairs: {labels: *labels, token_type_ids: [0, 0, 0, 0]}
""")


@pytest.mark.parametrize("case", SAME)
def test_lists_that_other_trainers_store_beside_tokens_are_used(sample_tokenizer, case):
    assert example({"input_ids": IDS, **SAME[case]}, sample_tokenizer) == (IDS, LAST_TWO)


def test_masks_may_be_weights_and_are_multiplied(sample_tokenizer):
    masks = {"loss_mask": [0, 0.5, 0.5, 1], "completion_mask": [0, 0, 1, 0.25]}
    assert example({"input_ids": IDS, **masks}, sample_tokenizer) == (IDS, [0, 0, 0.5, 0.25])


def test_padding_at_an_end_is_removed(sample_tokenizer):
    for before, after in ((0, 3), (2, 0)):
        row = {
            "input_ids": [0] * before + IDS + [0] * after,
            "labels": [-100] * before + LABELS + [-100] * after,
            "attention_mask": [0] * before + [1] * 4 + [0] * after,
        }
        assert example(row, sample_tokenizer) == (IDS, LAST_TWO)
        del row["labels"]
        all_but_the_first = [False, True, True, True]
        assert example(row, sample_tokenizer, supervise="all") == (IDS, all_but_the_first)


def test_the_first_token_is_never_a_target(sample_tokenizer):
    found = example({"input_ids": IDS, "labels": IDS}, sample_tokenizer)
    assert found == (IDS, [False, True, True, True])


def test_columns_name_the_keys_of_the_file(sample_tokenizer):
    row = {"ids": IDS, "targets": LABELS}
    columns = {"input_ids": "ids", "labels": "targets"}
    assert example(row, sample_tokenizer, columns=columns) == (IDS, LAST_TWO)


# Changes of a row with input_ids and labels, perhaps with settings; what its message must name; and
# the changes of a user who does as it says. Each is a YAML mapping without its braces.
REFUSED = """
input_ids: [5.0, 6.0] | input_ids is not a list of integers
input_ids: [true, true] | input_ids is not a list of integers
input_ids: [5, null] | input_ids is not a list of integers
input_ids: [[5, 6], [7, 8]] | input_ids is not a list of integers
input_ids: [5, 6, 7, 18446744073709551616] | set model.tokenizer
input_ids: [5, 6, 7, -1] | input_ids has -1
input_ids: [7, 8, 7, 296], labels: [7, 8, 7, 296] | set model.tokenizer | new_tokens: [one]
input_ids: [5], labels: [5] | no token is supervised
input_ids: [], labels: null, supervise: all | no token is supervised
labels: [5, -100, -100, -100] | no token is supervised
labels: [-100, 7, 8] | write one for each token | labels: [-100, -100, 7, 8]
labels: [-100, -100, 9, 8] | it must be the token's id, 7, or -100 | labels: [-100, -100, 7, 8]
labels: [-100, -100, 9, 8] | it must be the token's id, 7, or -100 | labels: [-100, -100, -100, 8]
loss_mask: [0, 0, 2, 1] | loss_mask has values ... above 1 | loss_mask: [0, 0, 1, 1]
loss_mask: [0, -0.5, 1, 1] | loss_mask has values below 0
loss_mask: [0, .nan, 1, 1] | loss_mask is not a list of
attention_mask: [0.5, 1, 1, 1] | attention_mask is not a list of integers
labels: null | add labels or loss_mask | labels: [-100, -100, 7, 8]
labels: null | add labels or loss_mask | loss_mask: [0, 0, 1, 1]
labels: null | set data.supervise: all to train on every token | supervise: all
supervise: all | set it to answers | supervise: answers
supervise: last | set it to answers | supervise: answers
position_ids: [0, 1, 0, 1] | write a row | input_ids: [7, 8], labels: [7, 8], position_ids: [0, 1]
seq_lengths: [2, 2] | (TRL: packing=False) | input_ids: [7, 8], labels: [7, 8], seq_lengths: [2]
attention_mask: [1, 1, 0, 1] | remove | input_ids: [5, 8], labels: [5, 8], attention_mask: [1, 1]
attention_mask: [1, 1, 1, 0] | padding at the end the label -100 | labels: [-100, -100, 7, -100]
labels: [-100, -100, -100, -100], attention_mask: [0, 0, 0, 0] | no token is supervised
mask_of_loss: [0, 0, 1, 1] | columns: {loss_mask: mask_of_loss} | columns: {loss_mask: mask_of_loss}
pixel_values: [1] | data.ignore_keys: [pixel_values] | ignore_keys: [pixel_values]
""".strip().splitlines()
SETTINGS = {"supervise", "columns", "ignore_keys"}


@pytest.mark.parametrize("case", REFUSED)
def test_tokens_that_do_not_fit_together_are_refused(sample_tokenizer, case):
    changes, named, *cures = case.split(" | ")

    def read(cure):
        given = {"input_ids": IDS, "labels": LABELS, **yaml.safe_load(f"{{{changes}, {cure}}}")}
        settings = {key: given.pop(key) for key in SETTINGS & given.keys()}
        tokenizer = copy.deepcopy(sample_tokenizer)
        tokenizer.add_tokens(given.pop("new_tokens", []))
        return example(given, tokenizer, **settings)

    refused(named, read, "", *cures)


@pytest.mark.skipif(not shutil.which("jq"), reason="needs jq")
@pytest.mark.parametrize(("ids", "labels"), [(IDS, [-100, 7, 8, -100]), (IDS[:3], [-100, 7, 8])])
def test_shifted_labels_are_recognized_and_the_command_moves_them(sample_tokenizer, ids, labels):
    row = json.dumps({"input_ids": ids, "labels": labels})
    line = refused("shifted", lambda row: example(row, sample_tokenizer), json.loads(row))
    moved = subprocess.check_output(["jq", "-c", line.split("'")[1]], input=row, text=True)
    assert example(json.loads(moved), sample_tokenizer) == (IDS, LAST_TWO)
