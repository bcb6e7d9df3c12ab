"""Evaluation: the exact mean loss per supervised token over all ranks."""

import torch
from torch import nn

from zerotrain.data.data_plan import DataPlan
from zerotrain.data.loader import load_steps
from zerotrain.model.loss import SupervisedLoss
from zerotrain.runtime.agreement import any_rank_preempted, sum_over_ranks
from zerotrain.runtime.process_group import Ranks


@torch.no_grad()
def evaluate(engine: nn.Module, loss: SupervisedLoss, plan: DataPlan, ranks: Ranks) -> float | None:
    """Mean cross entropy, in nats per supervised token, over every example of `plan` exactly once;
    None if a rank was preempted during the evaluation.

    All ranks take part in every micro-step, some with filler, because ZeRO-3 gathers weights in the
    forward pass.
    """
    was_training, preempted = engine.training, False
    engine.eval()
    total, tokens = torch.zeros((), dtype=torch.float64, device=ranks.device), 0
    for step in load_steps(plan, ranks.rank, 0, plan.steps_per_epoch):
        for batch in step.micro_batches:
            total += loss(engine, batch.to(ranks.device)).cross_entropy
        tokens += step.plan.supervised_tokens
        if preempted := any_rank_preempted(ranks):
            break
    engine.train(was_training)
    return None if preempted else float(sum_over_ranks(total) / tokens)
