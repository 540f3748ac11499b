"""AdamW as published: clipping, weight decay masks, linear warm-up and cosine decay to a tenth."""

import jax
import optax

from diffeqformer.transformer import Transformer, parameter_metadata


def learning_rate_schedule(config, steps: int) -> optax.Schedule:
    """Linear warm-up from 0 over `warmup_fraction` of the steps, then a cosine down to `final_fraction` of the peak.

    The rate of the first update is 0 if there is any warm-up. Section C.4 of the paper.
    """
    warmup_steps = min(round(config.warmup_fraction * steps), steps - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=steps,
        end_value=config.final_fraction * config.learning_rate,
    )


def decay_mask(model: Transformer) -> dict:
    """Which parameters get weight decay, as in the authors' runs: a tree like the parameters.

    Embeddings decay, and so do the kernels of per-layer weights, shared weights and adapters. A generator's parameters
    don't. In a DiffEqFormer with the block of a Llama, all parameters decay.
    """
    everything = model.depth.generated and model.field.generator_decays
    return jax.tree.map(lambda decays: decays or everything, parameter_metadata(model, "decays"))


def make_optimizer(config, decays: dict) -> optax.GradientTransformation:
    """AdamW over a run of `config.steps` updates, from its `optimizer` part.

    Args:
        decays: which of the trained parameters get weight decay.
    """
    adamw = optax.adamw(
        learning_rate_schedule(config.optimizer, config.steps),
        b1=config.optimizer.beta1,
        b2=config.optimizer.beta2,
        eps=config.optimizer.epsilon,
        weight_decay=config.optimizer.weight_decay,
        mu_dtype=config.optimizer.moment_dtype,
        mask=decays,
    )
    clip_norm = config.optimizer.clip_norm
    return optax.chain(optax.clip_by_global_norm(clip_norm), adamw) if clip_norm else adamw
