"""Which neurons of a layer are hot and which tokens heavy, from counts and costs: costs.py, choose.py, plan.py.
drift.py tells when a plan no longer suits the text."""

from twell.plan.choose import choose_plan, few_tokens_for, gain_left, union_of, union_tokens_for
from twell.plan.costs import Costs, costs_are, costs_for
from twell.plan.plan import MAX_FEW_TOKENS, Plan, PlanTensors, as_size, dense_plan, sizes_of, tokens_of

__all__ = [
    "MAX_FEW_TOKENS",
    "Costs",
    "Plan",
    "PlanTensors",
    "as_size",
    "choose_plan",
    "costs_are",
    "costs_for",
    "dense_plan",
    "few_tokens_for",
    "gain_left",
    "sizes_of",
    "tokens_of",
    "union_of",
    "union_tokens_for",
]
