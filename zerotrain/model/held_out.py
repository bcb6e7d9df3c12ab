"""What a run measures on its held-out sets: the loss, and answers to some of their prompts."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from zerotrain.config.schema import Config
from zerotrain.data.data_plan import DataPlan
from zerotrain.data.questions import choose_questions
from zerotrain.data.scorers import exact_match
from zerotrain.model.evaluate import evaluate
from zerotrain.model.generate import generate_answers, without_end
from zerotrain.model.loss import SupervisedLoss
from zerotrain.runtime.process_group import Ranks

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MAX_NATS = 700.0  # the perplexity of a higher loss is more than a float64 can be


@dataclass(frozen=True)
class HeldOutSets:
    """The held-out sets of a run, and what it takes to evaluate on them."""

    config: Config
    plans: dict[str, DataPlan]
    """By name, the first set first."""
    tokenizer: PreTrainedTokenizerBase
    engine: "DeepSpeedEngine"
    loss: SupervisedLoss
    ranks: Ranks

    def measure(self) -> tuple[dict[str, float], dict[str, list[dict]]] | None:
        """Evaluate on all sets; called by all ranks.

        Returns:
            loss/NAME, perplexity/NAME and, with eval.generate, exact_match/NAME of each set; and
            its answers, with their prompts and scores. None if a rank was preempted meanwhile.
        """
        values: dict[str, float] = {}
        answers: dict[str, list[dict]] = {}
        for name, plan in self.plans.items():
            loss = evaluate(self.engine, self.loss, plan, self.ranks)
            if loss is None:
                return None
            values[f"loss/{name}"] = loss
            values[f"perplexity/{name}"] = math.inf if loss > MAX_NATS else math.exp(loss)
            if not self.config.eval.generate:
                continue
            rows = self._answer(name, plan)
            if rows is None:
                return None
            values[f"exact_match/{name}"] = sum(row["score"] for row in rows) / len(rows)
            answers[name] = rows
        return values, answers

    def _answer(self, name: str, plan: DataPlan) -> list[dict] | None:
        """Prompt, expected answer, answer and score of some examples of a set, always the same."""
        settings, max_length = self.config.eval, self.config.data.max_length
        questions = choose_questions(name, plan.data, max_length, settings.generate)
        prompts = [question.prompt for question in questions]
        answers = generate_answers(self.engine, prompts, settings.max_new_tokens, self.ranks)
        if answers is None:
            return None
        rows = []
        for question, answer in zip(questions, answers, strict=True):
            expected_ids = without_end(self.engine.module, question.expected)
            row = {
                "prompt": self.tokenizer.decode(question.prompt),
                "expected": self.tokenizer.decode(expected_ids),
                "answer": self.tokenizer.decode(answer),
            }
            rows.append({**row, "score": exact_match(*row.values())})
        return rows
