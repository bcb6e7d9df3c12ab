"""Evaluation of a run: when, on what, what it reports, and what follows from it."""

import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from checkpoint.run_folder import COMPLETE, checkpoint_name, checkpoints_folder
from checkpoint.state import Best, Progress
from config.schema import Config
from data.data_plan import DataPlan
from data.questions import Question, choose_questions
from data.scorers import SCORERS
from model.evaluate import evaluate
from model.generate import generate_answers, without_end
from model.loss import SupervisedLoss
from runtime.agreement import run_on_first_rank
from runtime.errors import UserError
from runtime.process_group import Ranks
from tracking.metrics import Metrics

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MOST_NATS = 700.0  # the perplexity of a higher loss is more than a float64 can be


@dataclass(frozen=True)
class Evaluation:
    """Evaluates a run on its held-out sets."""

    config: Config
    plans: dict[str, DataPlan]
    """Of each held-out set, the first one first."""
    tokenizer: PreTrainedTokenizerBase
    engine: "DeepSpeedEngine"
    loss: SupervisedLoss
    ranks: Ranks
    metrics: Metrics
    total_steps: int

    def is_due(self, progress: Progress) -> bool:
        """Whether the config asks for an evaluation at this step that has not been done yet."""
        step, every = progress.step, self.config.eval.every_steps
        if not self.plans or progress.eval_loss is not None:
            return False
        if step in (0, self.total_steps):
            return step > 0 or self.config.eval.at_start
        return every > 0 and step % every == 0

    def run(self, progress: Progress) -> tuple[Progress, bool]:
        """Evaluate and report. Returns the progress with what was measured, and whether a rank was
        preempted meanwhile; then nothing was, and a resumed run starts with the evaluation.

        Raises:
            UserError: the scorer has failed.
        """
        began = time.perf_counter()
        values: dict[str, float] = {}
        generations: list[dict[str, Any]] = []
        for name, plan in self.plans.items():
            loss = evaluate(self.engine, self.loss, plan, self.ranks)
            if loss is None:
                return progress, True
            values[f"loss/{name}"] = loss
            values[f"perplexity/{name}"] = math.inf if loss > MOST_NATS else math.exp(loss)
            if not self.config.eval.generate:
                continue
            rows = self._generate(self._questions[name])
            if rows is None:
                return progress, True
            score = sum(row["score"] for row in rows) / len(rows)
            values[f"{self.config.eval.score_name}/{name}"] = score
            generations.append({"step": progress.step, "set": name, "rows": rows})
        eval_loss = next(iter(values.values()))
        seconds = time.perf_counter() - began
        self.metrics.log(
            "eval",
            {"step": progress.step, "eval_loss": eval_loss, **values, "eval_seconds": seconds},
        )
        for record in generations:
            self.metrics.log("generations", record)
        progress = progress.evaluated(eval_loss, values, self.config.eval.metric)
        if reason := self.stop_reason(progress):
            self.metrics.log("event", {"step": progress.step, "name": "early_stop", "text": reason})
        return progress, False

    def is_last(self, progress: Progress) -> bool:
        """Whether no step follows."""
        return progress.step >= self.total_steps or self.stop_reason(progress) is not None

    def asks_for_a_save(self, progress: Progress) -> bool:
        """Whether this step's evaluation ends the run, or is the best so far, to be kept."""
        best, step = self._best(progress), progress.step
        is_kept = self.config.checkpoint.keep_best > 0 and best is not None and best.step == step
        return step > 0 and (is_kept or self.stop_reason(progress) is not None)

    def stop_reason(self, progress: Progress) -> str | None:
        """Why the run is finished before its last step, by eval.patience; None if it is not."""
        best, patience = self._best(progress), self.config.eval.patience
        if best is None or not 0 < patience <= best.evaluations_since:
            return None
        return (
            f"early stop at step {progress.step:,}: {best.evaluations_since:,} evaluations without "
            f"a better {best.metric} (eval.patience)"
        )

    def ending(self, progress: Progress) -> list[str]:
        """Lines for the end of a finished run: why it stopped early, and where its best is."""
        lines, best = [self.stop_reason(progress)], self._best(progress)
        if best is not None:
            folder = checkpoints_folder(self.config.output_dir) / checkpoint_name(best.step)
            kept = folder if (folder / COMPLETE).is_file() else "not saved"
            cure = "" if kept == folder else " (checkpoint.keep_best: 1 keeps it)"
            lines.append(f"best: step {best.step:,}, {best.metric} {best.value:.4f}, {kept}{cure}")
        return list(filter(None, lines))

    def _best(self, progress: Progress) -> Best | None:
        """The best evaluation, unless it was the best by another metric than the config's."""
        best = progress.best
        return best if best is not None and best.metric == self.config.eval.metric else None

    @cached_property
    def _questions(self) -> dict[str, list[Question]]:
        count, longest = self.config.eval.generate, self.config.data.max_length
        return {
            name: choose_questions(name, plan.data, longest, count)
            for name, plan in self.plans.items()
        }

    def _generate(self, questions: list[Question]) -> list[dict[str, Any]] | None:
        """Prompt, expected answer, answer and score of each question; None if preempted."""
        limit = self.config.eval.max_new_tokens
        prompts = [question.prompt for question in questions]
        answers = generate_answers(self.engine, prompts, limit, self.ranks)
        if answers is None:
            return None
        rows = []
        for question, answer in zip(questions, answers, strict=True):
            expected = without_end(self.engine.module, question.expected)
            texts = map(self.tokenizer.decode, (question.prompt, expected, answer))
            rows.append(dict(zip(("prompt", "expected", "answer"), texts, strict=True)))
        return run_on_first_rank(self.ranks, lambda: [row | self._score(row) for row in rows])

    def _score(self, row: dict[str, str]) -> dict[str, float]:
        name = self.config.eval.scorer
        try:
            score = float(SCORERS[name](row["prompt"], row["expected"], row["answer"]))
        except Exception as error:  # it is the user's
            raise UserError(
                f"eval.scorer: {name} in data/scorers.py fails with {type(error).__name__} "
                f"({error}) for the answer {row['answer'][:80]!r}; correct it, and start again"
            ) from error
        return {"score": score}
