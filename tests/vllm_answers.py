"""Greedy answers of vLLM, for test_serving.py; runs in the environment that has vLLM.

python vllm_answers.py REQUESTS.json ANSWERS.json
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def answers(conversations, adapter=None, **options):
    """For each conversation: token ids of its prompt and of the answer, the log-probabilities of
    all tokens but the first (with an adapter, for whose prompts vLLM 0.32 has none, of the
    answer), and why the answer ended. `options` are those of LLM.
    """
    greedy = SamplingParams(
        temperature=0, max_tokens=64, logprobs=0, prompt_logprobs=None if adapter else 0
    )
    llm = LLM(dtype="float32", enforce_eager=True, max_model_len=256, **options)
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    outputs = llm.chat(conversations, greedy, lora_request=lora, use_tqdm=False)
    found = []
    for output in outputs:
        [answer] = output.outputs
        tokens = [*output.prompt_token_ids, *answer.token_ids]
        steps = [*(output.prompt_logprobs or []), *answer.logprobs]
        found.append({
            "prompt": list(output.prompt_token_ids),
            "answer": list(answer.token_ids),
            "log_probs": [
                step[token].logprob
                for step, token in zip(reversed(steps), reversed(tokens), strict=False)
                if step is not None
            ][::-1],
            "ended_by": answer.finish_reason,
        })  # fmt: skip
    return found


if __name__ == "__main__":
    requests = json.loads(Path(sys.argv[1]).read_text())
    found = {name: answers(**request) for name, request in requests.items()}
    Path(sys.argv[2]).write_text(json.dumps(found))
