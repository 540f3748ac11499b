"""AdamW as published: clipping, decay masks, linear warm-up and cosine decay to a tenth."""

import jax
import optax


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


def decay_mask(params: dict) -> dict:
    """Which parameters decay: embeddings, and the kernels of per-layer and shared weights.

    Everything that belongs to the generator is left alone, as in the authors' code for the GPT flavour.
    """

    def decays(path, _):
        return path[-1].key in ("token_embedding", "position_embedding", "kernel")

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(config, steps: int) -> optax.GradientTransformation:
    """AdamW over a run of `steps` updates, from the `optimizer` part of a config."""
    adamw = optax.adamw(
        learning_rate_schedule(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw) if config.clip_norm else adamw
