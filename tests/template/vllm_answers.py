"""Greedy answers of vLLM, for test_serving.py; runs in the environment that has vLLM.

python vllm_answers.py REQUESTS.json ANSWERS.json
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def answers(conversations, adapter=None, **options):
    """For each conversation: token ids of its prompt and of the answer, and why the answer ended.
    `options` are those of LLM.
    """
    greedy = SamplingParams(temperature=0, max_tokens=64)
    llm = LLM(dtype="float32", enforce_eager=True, max_model_len=256, **options)
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    outputs = llm.chat(conversations, greedy, lora_request=lora, use_tqdm=False)
    found = []
    for output in outputs:
        [answer] = output.outputs
        found.append({
            "prompt": list(output.prompt_token_ids),
            "answer": list(answer.token_ids),
            "ended_by": answer.finish_reason,
        })  # fmt: skip
    return found


if __name__ == "__main__":
    requests = json.loads(Path(sys.argv[1]).read_text())
    found = {name: answers(**request) for name, request in requests.items()}
    Path(sys.argv[2]).write_text(json.dumps(found))
