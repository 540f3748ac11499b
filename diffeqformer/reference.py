"""The whole family in plain JAX, to be read first and to test everything else against.

No modules, no sharding, no tricks: loops over depth and heads, weights made where they are used.
Parameters are the nested dictionaries that checkpoints hold, so each name below is a name there.
In float64 (`with jax.enable_x64(True)`) it is the yardstick of the fast paths.

Tong et al., Neural ODE Transformers, ICLR 2025: sections 4 and A. A block moves the state by

    dx/dt = attention(norm_attention(x; t); t) + feed_forward(norm_mlp(x; t); t)

and all of its weights depend on the depth t in [0, 1].
"""

import jax
import jax.numpy as jnp
import numpy as np

EPSILON = 1e-5


def time_features(t, num_frequencies, time_frequency):
    """e(t) = [t, sin(c t w), cos(c t w)], w_k = 10000^(-k / K): [2 K + 1]."""
    omega = 10000.0 ** (-np.arange(num_frequencies) / num_frequencies)
    return np.concatenate([[t], np.sin(time_frequency * t * omega), np.cos(time_frequency * t * omega)])


def time_mlp(p, e):
    """h(t) = lin2(silu(lin1(e(t)))): [E]."""
    a = e @ p["lin1"] + p["lin1_bias"]
    return a * jax.nn.sigmoid(a) @ p["lin2"] + p["lin2_bias"]


def generated_layer(p, e):
    """One layer's weights at the time whose features are e."""
    h = time_mlp(p["mlp"], e)
    if "projection" in p:
        kernel = jnp.einsum("e,ieo->io", h, p["projection"]) + p["constant"]
        return {"kernel": kernel, "bias": h @ p["bias_projection"]}
    return {"scale": 1 + h @ p["scale_projection"], "shift": h @ p["shift_projection"]}


def generated_block(depth, e):
    """All weights of the block at the time whose features are e; `depth` is params["depth"]["layers"]."""
    return {name: generated_layer(p, e) for name, p in depth.items()}


def layer_norm(w, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * w["scale"] + w["shift"]


def linear(w, x):
    return x @ w["kernel"] + w["bias"]


def attention(w, x, heads):
    """Equation (4) for one sequence x [S, D]: causal, scores divided by sqrt(K)."""
    S, D = x.shape
    K = D // heads
    qkv = linear(w["qkv"], layer_norm(w["norm_attention"], x)).reshape(S, heads, 3, K)
    outputs = []
    for head in range(heads):
        q, k, v = qkv[:, head, 0], qkv[:, head, 1], qkv[:, head, 2]
        scores = jnp.where(np.tri(S, dtype=bool), q @ k.T / np.sqrt(K), -jnp.inf)
        outputs.append(jax.nn.softmax(scores, axis=-1) @ v)
    return linear(w["attention_out"], jnp.concatenate(outputs, axis=-1))


def feed_forward(w, x):
    """Equation (5) for x [S, D], with the tanh form of GELU."""
    a = linear(w["mlp_up"], layer_norm(w["norm_mlp"], x))
    return linear(w["mlp_down"], 0.5 * a * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3))))


def euler(blocks, x, heads):
    """x_{n+1} = x_n + (attention + feed-forward)(x_n; t_n) / L: the states [L + 1, S, D]."""
    states = [x]
    for w in blocks:
        states.append(states[-1] + (attention(w, states[-1], heads) + feed_forward(w, states[-1])) / len(blocks))
    return jnp.stack(states)


def lie_trotter(blocks, x, heads):
    """Attention, then feed-forward, each added whole: a vanilla transformer's states [L + 1, S, D]."""
    states = [x]
    for w in blocks:
        x = states[-1] + attention(w, states[-1], heads)
        states.append(x + feed_forward(w, x))
    return jnp.stack(states)


def diffeqformer_blocks(params, num_steps, num_frequencies, time_frequency=1000.0):
    """The block's weights at t_n = (n + 1) / L, made one time after the other."""
    times = np.arange(1, num_steps + 1) / num_steps
    return [
        generated_block(params["depth"]["layers"], time_features(t, num_frequencies, time_frequency)) for t in times
    ]


def gpt_blocks(params, num_steps):
    """Weights of their own for every layer, unstacked."""
    return [jax.tree.map(lambda leaf: leaf[n], params["depth"]["layers"]) for n in range(num_steps)]


def shared_blocks(params, num_steps):
    """The same weights for every step."""
    return [params["depth"]["layers"]] * num_steps


def forward(params, blocks, solver, tokens, heads):
    """Logits [S, V] and states [L + 1, S, D] of one sequence of tokens [S]."""
    x = params["token_embedding"][tokens] + params["position_embedding"][: len(tokens)]
    states = solver(blocks, x, heads)
    return layer_norm(params["final_norm"], states[-1]) @ params["token_embedding"].T, states


def loss(logits, tokens):
    """Mean cross-entropy in nats of the next token for logits [B, S, V]; the last position predicts nothing."""
    log_probabilities = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    return -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1).mean()
