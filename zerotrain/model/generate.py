"""Greedy answers of the model that is being trained, computed by all ranks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from zerotrain.runtime.agreement import any_rank_preempted, gather_json
from zerotrain.runtime.process_group import Ranks

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@torch.no_grad()
def generate_answers(
    engine: "DeepSpeedEngine", prompts: Sequence[np.ndarray], max_new_tokens: int, ranks: Ranks
) -> list[list[int]] | None:
    """The token ids of an answer to each prompt, int [tokens], the same on all ranks; None if a
    rank was preempted. An answer ends at one of the end tokens that training set in the model's
    generation config, which is left out, or after `max_new_tokens`.

    Each rank answers its share, one prompt at a time: without padding, the answers do not depend on
    the number of ranks. One without a prompt repeats the last one, because ZeRO-3 gathers the
    weights for all ranks at once.
    """
    model, was_training = engine.module, engine.training
    answered: dict[int, list[int]] = {}  # by this rank
    engine.eval()
    for first in range(0, len(prompts), ranks.world_size):
        if any_rank_preempted(ranks):
            break
        number = min(first + ranks.rank, len(prompts) - 1)
        prompt = torch.from_numpy(prompts[number].astype(np.int64))[None].to(ranks.device)
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            num_beams=1,
            max_new_tokens=max_new_tokens,
            synced_gpus=ranks.world_size > 1,  # ranks whose answer has ended wait for the others
        )
        answered[number] = without_end(model, ids[0, prompt.shape[1] :])
    engine.train(was_training)
    if any_rank_preempted(ranks):
        return None
    of_ranks = gather_json(ranks, list(answered.items()))
    answers = dict(pair for pairs in of_ranks for pair in pairs)
    return [answers[number] for number in range(len(prompts))]


def without_end(model: torch.nn.Module, ids: np.ndarray | torch.Tensor) -> list[int]:
    """Ids, int [tokens], up to the first token at which generation stops."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    found = ids.tolist()
    return found[: next((at for at, token in enumerate(found) if token in ends), len(found))]
