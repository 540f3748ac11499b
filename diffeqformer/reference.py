"""All models in plain JAX. Read this first; everything else is tested against it.

There are no modules, no sharding and no tricks: only loops over depth and heads, and weights that are computed where
they are used. Parameters are nested dictionaries with the names used in checkpoints. In float64 (`with
jax.enable_x64(True)`) this is the reference for the fast implementations.

Tong et al., Neural ODE Transformers, ICLR 2025: sections 4 and A. A block moves the state by

    dx/dt = attention(norm_attention(x; t); t) + feed_forward(norm_mlp(x; t); t)

and all of its weights depend on the depth t in [0, 1]. There are three blocks, GPT's, Llama's and GPT-NeoX's.
"""

import jax
import jax.numpy as jnp
import numpy as np

# ---------------------------------------------------------------- weights from time


def time_features(t, num_frequencies, time_frequency):
    """e(t) = [t, sin(c t w), cos(c t w)], w_k = 10000^(-k / n): [2 n + 1]."""
    omega = 10000.0 ** (-np.arange(num_frequencies) / num_frequencies)
    return np.concatenate([[t], np.sin(time_frequency * t * omega), np.cos(time_frequency * t * omega)])


def time_mlp(p, e):
    """h(t) = lin2(silu(lin1(e(t)))): [E]."""
    return jax.nn.silu(e @ p["lin1"] + p["lin1_bias"]) @ p["lin2"] + p["lin2_bias"]


def generated_layer(p, h):
    """One layer's weights, given h(t): kernel h P + B, bias h P_b; for a norm, scale 1 + h P_s and shift h P_h.

    A looped model's kernel and bias are shared; some are gated by 1 + h P_g.
    """
    if "scale_projection" in p:
        return {"scale": 1 + h @ p["scale_projection"], "shift": h @ p["shift_projection"]}
    if "kernel" in p:
        gate = 1 + h @ p["gate_projection"] if "gate_projection" in p else 1
        return {name: p[name] * gate for name in ("kernel", "bias") if name in p}
    weights = {"kernel": jnp.einsum("e,ieo->io", h, p["projection"]) + p["constant"]}
    if "bias_projection" in p:
        weights["bias"] = h @ p["bias_projection"]
    return weights


def generated_block(depth, e):
    """All weights of the block at the time whose features are e; `depth` is params["depth"].

    Each layer has its own MLP or, in the alternative design of Fig. 17 and in looped models, all layers share one.
    """
    return {
        name: generated_layer(p, time_mlp(depth["mlp"] if "mlp" in depth else p["mlp"], e))
        for name, p in depth["layers"].items()
    }


# ---------------------------------------------------------------- one block, given its weights


def linear(w, x):
    return x @ w["kernel"] + w.get("bias", 0)


def layer_norm(w, x, epsilon=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * w["scale"] + w["shift"]


def rms_norm(w, x, epsilon=1e-5):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * w["scale"] + w.get("shift", 0)


def causal_attention(q, k, v):
    """Equation (1) for one head, [S, K] each."""
    scores = jnp.where(np.tri(len(q), dtype=bool), q @ k.T / np.sqrt(q.shape[1]), -jnp.inf)
    return jax.nn.softmax(scores, axis=-1) @ v


def frequency(k, R, theta, scaling):
    """Radians by which a position turns pair k of R / 2: theta^(-2 k / R), or less with Llama 3's scaling."""
    radians = theta ** (-2 * k / R)
    if not scaling:
        return radians
    factor, low, high, length = scaling
    turns = length * radians / (2 * np.pi)
    if turns > high or turns < low:
        return radians if turns > high else radians / factor
    share = (turns - low) / (high - low)
    return share * radians + (1 - share) * radians / factor


def rotate(x, R, theta=10000.0, scaling=()):
    """Rotary positions for x [S, K]: the pair (k, k + R / 2) of the first R entries is rotated."""
    turn = np.exp(1j * np.outer(np.arange(len(x)), [frequency(k, R, theta, scaling) for k in range(R // 2)]))
    z = (x[:, : R // 2] + 1j * x[:, R // 2 : R]) * turn
    return jnp.concatenate([z.real, z.imag, x[:, R:]], axis=-1)


def gpt_attention(w, x, heads, epsilon=1e-5, rotary_fraction=0, **rotary):
    """Equation (4) for one sequence x [S, D]. In a GPT-NeoX, positions also rotate a part of each head."""
    qkv = linear(w["qkv"], layer_norm(w["norm_attention"], x, epsilon)).reshape(len(x), heads, 3, -1)
    R, outputs = int(rotary_fraction * qkv.shape[-1]), []
    for head in range(heads):
        q, k, v = qkv[:, head].swapaxes(0, 1)
        outputs.append(causal_attention(rotate(q, R, **rotary), rotate(k, R, **rotary), v))
    return linear(w["attention_out"], jnp.concatenate(outputs, axis=-1))


def gpt_feed_forward(w, x, epsilon=1e-5, exact=False):
    """Equation (5) for x [S, D], with the tanh form of GELU or, in a GPT-NeoX, the exact one."""
    a = linear(w["mlp_up"], layer_norm(w["norm_mlp"], x, epsilon))
    gate = jax.scipy.special.erf(a / np.sqrt(2)) if exact else jnp.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3))
    return linear(w["mlp_down"], 0.5 * a * (1 + gate))


def llama_attention(w, x, heads, epsilon, **rotary):
    """Heads share a key and a value if there are fewer of these."""
    y = rms_norm(w["norm_attention"], x, epsilon)
    q, k, v = (linear(w[name], y) for name in ("query", "key", "value"))
    K = q.shape[1] // heads
    q, k, v = (a.reshape(len(x), -1, K).swapaxes(0, 1) for a in (q, k, v))
    own = [head * len(k) // heads for head in range(heads)]
    outputs = [causal_attention(rotate(q[i], K, **rotary), rotate(k[j], K, **rotary), v[j]) for i, j in enumerate(own)]
    return linear(w["attention_out"], jnp.concatenate(outputs, axis=-1))


def llama_feed_forward(w, x, epsilon):
    y = rms_norm(w["norm_mlp"], x, epsilon)
    return linear(w["mlp_down"], jax.nn.silu(linear(w["mlp_gate"], y)) * linear(w["mlp_up"], y))


# ---------------------------------------------------------------- depth


def branches(w, heads, epsilon, **options):
    """The two branches of the block with these weights, each a function of x [S, D].

    Args:
        options: of `rotate`, theta and scaling; and rotary_fraction, which a NeoX's block alone has.
    """
    if "rotary_fraction" in options:
        return lambda x: gpt_attention(w, x, heads, epsilon, **options), lambda x: gpt_feed_forward(w, x, epsilon, True)
    if "qkv" in w:
        return lambda x: gpt_attention(w, x, heads), lambda x: gpt_feed_forward(w, x)
    return lambda x: llama_attention(w, x, heads, epsilon, **options), lambda x: llama_feed_forward(w, x, epsilon)


def euler(blocks, x, heads, norm_of_norm=True, epsilon=1e-6, unit_steps=False, **options):
    """x_{n+1} = x_n + (attention + feed-forward)(x_n; t_n) / L: the states [L + 1, S, D].

    As published, Llama's second norm reads the first one's output (`norm_of_norm`). A NeoX has `unit_steps`.
    """
    states = [x]
    for w in blocks:
        x, (attention, feed_forward) = states[-1], branches(w, heads, epsilon, **options)
        y = rms_norm(w["norm_attention"], x, epsilon) if norm_of_norm and "qkv" not in w else x
        states.append(x + (attention(x) + feed_forward(y)) / (1 if unit_steps else len(blocks)))
    return jnp.stack(states)


def lie_trotter(blocks, x, heads, epsilon=1e-5, **options):
    """Attention, then feed-forward, each added in full: a vanilla transformer's states [L + 1, S, D]."""
    states = [x]
    for w in blocks:
        attention, feed_forward = branches(w, heads, epsilon, **options)
        x = states[-1] + attention(states[-1])
        states.append(x + feed_forward(x))
    return jnp.stack(states)


def generated_blocks(params, num_steps, num_frequencies, time_frequency=1000.0):
    """The block's weights at t_n = (n + 1) / L, computed for one time after the other."""
    times = np.arange(1, num_steps + 1) / num_steps
    features = [time_features(t, num_frequencies, time_frequency) for t in times]
    return [generated_block(params["depth"], e) for e in features]


def interpolated_blocks(params, num_steps):
    """The block's weights at t_n = (n + 1) / L, linear in t between knots k / E, constant before the first."""

    def at(t, knots):
        place = max(t * len(knots) - 1, 0)
        before = min(int(place), len(knots) - 2)
        return knots[before] + (place - before) * (knots[before + 1] - knots[before])

    layers = params["depth"]["layers"]
    return [jax.tree.map(lambda knots: at((n + 1) / num_steps, knots), layers) for n in range(num_steps)]


def per_layer_blocks(params, num_steps):
    """Separate weights for every layer, unstacked."""
    return [jax.tree.map(lambda leaf: leaf[n], params["depth"]["layers"]) for n in range(num_steps)]


def shared_blocks(params, num_steps):
    """The same weights for every step."""
    return [params["depth"]["layers"]] * num_steps


# ---------------------------------------------------------------- the language model


def forward(params, blocks, solver, tokens, heads, final_epsilon=1e-5):
    """Logits [S, V] and states [L + 1, S, D] of one sequence of tokens [S]."""
    x = params["token_embedding"][tokens]
    if "position_embedding" in params:  # GPT
        x = x + params["position_embedding"][: len(tokens)]
    states, norm = solver(blocks, x, heads), layer_norm if "qkv" in blocks[0] else rms_norm
    head = params.get("lm_head", params["token_embedding"].T)
    return norm(params["final_norm"], states[-1], final_epsilon) @ head, states


def loss(logits, tokens):
    """Mean cross-entropy in nats of the next token for logits [B, S, V]; the last position predicts nothing."""
    log_probabilities = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    return -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1).mean()
