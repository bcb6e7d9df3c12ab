"""Greedy answers of the model that is being trained, computed by all ranks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from runtime.agreement import count_ranks, gather_json
from runtime.process_group import Ranks

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
    ends, mine = end_tokens(model), {}
    engine.eval()
    try:
        for first in range(0, len(prompts), ranks.world_size):
            number = min(first + ranks.rank, len(prompts) - 1)
            prompt = torch.from_numpy(prompts[number].astype(np.int64))[None].to(ranks.device)
            together = _Together(ends, ranks)
            ids = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                num_beams=1,
                max_new_tokens=max_new_tokens,
                eos_token_id=None,  # a rank whose answer has ended continues: see _Together
                stopping_criteria=StoppingCriteriaList([together]),
            )
            if together.is_preempted:
                return None
            mine[number] = _until(ends, ids[0, prompt.shape[1] :].tolist())
    finally:
        engine.train(was_training)
    answers = dict(pair for pairs in gather_json(ranks, list(mine.items())) for pair in pairs)
    return [answers[number] for number in range(len(prompts))]


def end_tokens(model: torch.nn.Module) -> set[int]:
    """The ids at which generation stops."""
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends} - {None}


def without_end(model: torch.nn.Module, ids: np.ndarray) -> list[int]:
    """Ids, int [tokens], up to the first end token."""
    return _until(end_tokens(model), ids.tolist())


def _until(ends: set[int], ids: list[int]) -> list[int]:
    return ids[: next((at for at, token in enumerate(ids) if token in ends), len(ids))]


class _Together(StoppingCriteria):
    """Lets all ranks stop after the same token: once every rank's answer has ended, or one rank is
    preempted. With `synced_gpus` alone, as generate() sets it under ZeRO-3, the others would finish
    their answers first, which takes minutes where each token gathers a large model.
    """

    def __init__(self, ends: set[int], ranks: Ranks) -> None:
        self.ends, self.ranks = ends, ranks
        self.has_ended = self.is_preempted = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        """Whether to stop, bool [1]; called by all ranks after each token."""
        self.has_ended = self.has_ended or int(input_ids[0, -1]) in self.ends
        is_signalled = self.ranks.stop.signal is not None
        running, preempted = count_ranks(self.ranks, not self.has_ended, is_signalled)
        self.is_preempted = preempted > 0
        return torch.tensor([running == 0 or self.is_preempted], device=input_ids.device)
