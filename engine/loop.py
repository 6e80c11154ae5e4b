"""The loop: generate, score, log-probabilities, update, hand over, evaluate, save. Every algorithm runs through it."""

from __future__ import annotations

from engine import experience, rewards
from engine.config import Config
from engine.session import Session


def train(config: Config, config_file: str | None) -> None:
    """Trains to ``train.steps``, from the start or from the newest checkpoint of ``config.resume``."""
    with Session.open(config, config_file) as run:
        if run.state.step == 0:
            run.evaluate()

        while run.state.step < config.train.steps:
            with run.phase("generate"):
                samples = run.sample()
            run.rest()
            with run.phase("reward"):
                rewards.score(samples, run.reward_function, config)
            with run.phase("old"):
                behaviour = experience.behaviour_logprobs(samples)
                old = (
                    run.trainer.logprobs(run.trainer.policy, samples)
                    if experience.recomputes_old(config)
                    else behaviour
                )
            with run.phase("ref"):
                reference = run.trainer.reference
                ref = run.trainer.logprobs(reference, samples) if reference else None
            with run.phase("value"):
                values, end_values = run.trainer.values(samples) if run.trainer.value else (None, None)

            rollout = experience.rollout(samples, old, ref, values, end_values)
            objective = experience.objective(config, rollout, run.state.kl_coef, run.world)
            with run.phase("train"):
                tokens = {"old_logprobs": old, "sampler_logprobs": behaviour, "ref_logprobs": ref, "old_values": values}
                metrics = run.trainer.update(
                    samples,
                    {name: vector for name, vector in tokens.items() if vector is not None},
                    objective,
                    step=run.state.step,
                    train_policy=config.algo != "ppo" or run.state.step >= config.ppo.value_warmup_steps,
                )
            run.state.version += 1
            run.hand_over()

            run.finish_step(samples, rollout, objective.metrics | metrics)
            run.evaluate()
            run.save()
        run.finish()
