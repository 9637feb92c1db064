"""The plan of a layer: which neurons are hot, which tokens heavy, and from how many tokens on it runs sparsely.

plan.py: what a plan is. costs.py: what things cost on a GPU; tuned.py: costs that ``twell tune`` measured. choose.py
makes plans from counts and costs. drift.py tells when a plan no longer suits the text."""

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
