"""Rows of several formats, for the tests of what reads them all."""

from harness.inputs import write_rows

TWO_TURNS = [
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "It is 4."},
]


def mix_of_formats(tmp_path, chat_rows):
    """Sources of chat, prompt-completion, instruction and text rows, and rows of tokens."""
    chat = [{"id": f"row {i}", **row} for i, row in enumerate(chat_rows[:9])]
    chat.append({"messages": TWO_TURNS})
    pairs = [{"prompt": f"{i}+1? ", "completion": f"{i + 1}\n"} for i in range(6)]
    tasks = [{"instruction": "Add", "input": f"{i} and 1", "output": "ok"} for i in range(6)]
    files = {"chat": chat, "pairs": pairs, "tasks": tasks, "text": [{"text": "one two"}] * 3}
    files["tokens"] = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}] * 3
    return [str(write_rows(tmp_path / f"{name}.jsonl", rows)) for name, rows in files.items()]
