"""The algorithms that Tandem comes with, by name. Imports no torch."""

from __future__ import annotations

from algorithms.base import Algorithm
from algorithms.bok import BestOfK
from algorithms.dpo import DPO
from algorithms.grpo import GRPO
from algorithms.online_dpo import OnlineDPO
from algorithms.ppo import PPO
from algorithms.reward_model import RewardModel
from algorithms.rloo import RLOO
from algorithms.sft import SFT

BUILT_IN: dict[str, Algorithm] = {
    one.name: one for one in (PPO(), RLOO(), GRPO(), OnlineDPO(), BestOfK(), SFT(), DPO(), RewardModel())
}
