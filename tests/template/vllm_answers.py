"""Writes greedy answers of vLLM, for test_serving.py. Runs in the environment that has vLLM.

python vllm_answers.py REQUESTS.json ANSWERS.json
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def answers(conversations, adapter=None, **options):
    """Yield for each conversation the token ids of prompt and answer, and why the answer ended.

    Args:
        options: arguments of LLM.
    """
    greedy = SamplingParams(temperature=0, max_tokens=64)
    llm = LLM(dtype="float32", enforce_eager=True, max_model_len=256, **options)
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    for output in llm.chat(conversations, greedy, lora_request=lora, use_tqdm=False):
        [answer] = output.outputs
        yield [*output.prompt_token_ids], [*answer.token_ids], answer.finish_reason


if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([*answers(**request)]))
