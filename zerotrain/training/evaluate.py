"""Evaluation on the held-out sets: the mean loss, and with eval.generate answers to questions and
their scores.
"""

from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from transformers import PreTrainedTokenizerBase

from zerotrain.data.data_plan import DataPlan
from zerotrain.data.loader import load_steps
from zerotrain.data.questions import Question, exact_match
from zerotrain.runtime.ranks import Ranks
from zerotrain.training.loss import SupervisedLoss
from zerotrain.training.out_of_memory import describe_micro_batch, explain_out_of_memory


class Preempted(Exception):
    """A rank was preempted during an evaluation. All ranks raise it at the same point."""


@dataclass(frozen=True)
class HeldOutSets:
    """The held-out sets of a run, with the model and the ranks that evaluate on them."""

    plans: dict[str, DataPlan]
    """The plan of each set by the set's name, in the order of the config."""
    questions: dict[str, list[Question]]
    """The questions from each set; empty lists without eval.generate."""
    max_new_tokens: int
    tokenizer: PreTrainedTokenizerBase
    engine: DeepSpeedEngine
    loss: SupervisedLoss
    ranks: Ranks

    @torch.no_grad()
    def measure(self) -> tuple[dict[str, float], dict[str, list[dict]]]:
        """Evaluate on all sets. All ranks call it.

        Returns:
            The metrics loss/NAME, perplexity/NAME, with a router loss router_loss/NAME, and with
            eval.generate exact_match/NAME; and each set's answers with their prompts and scores.

        Raises:
            Preempted: a rank was preempted meanwhile.
        """
        values, answers = {}, {}
        was_training = self.engine.training
        self.engine.eval()  # without dropout
        try:
            for name, plan in self.plans.items():
                loss, router_loss = self._mean_losses(plan)
                values[f"loss/{name}"] = loss
                values[f"perplexity/{name}"] = float(np.exp(loss))
                if self.loss.router_loss.coefficient:
                    values[f"router_loss/{name}"] = router_loss
                if self.questions[name]:
                    with explain_out_of_memory(lambda: "an answer: lower eval.max_new_tokens"):
                        answers[name] = self._answers(self.questions[name])
                    values[f"exact_match/{name}"] = fmean(row["score"] for row in answers[name])
        finally:
            self.engine.train(was_training)
        return values, answers

    def _mean_losses(self, plan: DataPlan) -> tuple[float, float]:
        """Return the mean cross entropy over a set, in nats per supervised token, and the router
        loss with the set's own numbers of tokens per expert, NaN if the model has none.

        Every supervised token counts exactly once, whatever its weight. All ranks take part in
        every micro-step, some with filler, because ZeRO-3 gathers weights in the forward pass.
        """
        ranks, router_loss = self.ranks, self.loss.router_loss
        router_loss.begin()
        total = torch.zeros((), dtype=torch.float64, device=ranks.device)
        tokens = 0
        steps = load_steps(plan, ranks.data_rank, 0, plan.steps_per_epoch, ranks.sequence_part)
        for step in steps:
            examples = step.plan.micro_batches[0][ranks.data_rank]
            with explain_out_of_memory(describe_micro_batch, plan, examples):
                for batch in step.micro_batches:
                    # Without weights, so that runs with different ones can be compared.
                    batch = batch.about_targets(batch.of_targets[:1])
                    total += self.loss(self.engine, batch).cross_entropy
            tokens += step.plan.supervised_tokens
            self._check_preemption()
        # Each rank of a tensor-parallel group has the group's loss.
        mean = float(ranks.sum(total) / ranks.tensor / tokens)
        tally = ranks.sum(router_loss.tally.to(ranks.device)) / ranks.tensor
        return mean, router_loss.of_tally(tally)

    def _answers(self, questions: list[Question]) -> list[dict]:
        """Return prompt, expected answer, answer and score of each question, the same on all ranks.

        Each replica answers its share, one prompt at a time: without padding, the answers do not
        depend on the number of ranks. A replica without a prompt repeats the last question, because
        all ranks take part when ZeRO-3 gathers weights.
        """
        own = {}
        for first in range(0, len(questions), self.ranks.replicas):
            self._check_preemption()  # all ranks have the same number of rounds
            number = min(first + self.ranks.replica, len(questions) - 1)
            prompt, expected = questions[number]
            ids = (prompt, self._without_end(expected), self._generate(prompt))
            texts = map(self.tokenizer.decode, ids)
            texts = dict(zip(("prompt", "expected", "answer"), texts, strict=True))
            own[number] = {**texts, "score": exact_match(*texts.values())}
        self._check_preemption()
        # Ranks of the same replica, and replicas that repeat a question, have the same answers.
        rows = dict(row for rank in self.ranks.gather_json(list(own.items())) for row in rank)
        return [rows[number] for number in range(len(questions))]

    def _generate(self, prompt: np.ndarray) -> list[int]:
        """Return the token ids of a greedy answer to a prompt, int [tokens].

        The answer ends before an end token of the model's generation config, or after
        eval.max_new_tokens.
        """
        ids = torch.as_tensor(prompt, dtype=torch.int64, device=self.ranks.device)[None]
        answer = self.engine.module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=1,
            max_new_tokens=self.max_new_tokens,
            synced_gpus=self.ranks.world_size > 1,  # all ranks run until the last answer ends
        )
        return self._without_end(answer[0, ids.shape[1] :])

    def _without_end(self, ids: np.ndarray | torch.Tensor) -> list[int]:
        """Return the ids before the first token at which generation stops, of ids int [tokens]."""
        ends = np.atleast_1d(self.engine.module.generation_config.eos_token_id)
        return list(takewhile(lambda token: token not in ends, ids.tolist()))

    def _check_preemption(self) -> None:
        if self.ranks.any_preempted():
            raise Preempted
