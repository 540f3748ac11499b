"""Induction heads: heads that attend from a repeated token to the token that followed its first occurrence.

@article{olsson2022context,
  title={In-context Learning and Induction Heads},
  author={Olsson, Catherine and Elhage, Nelson and Nanda, Neel and Joseph, Nicholas and DasSarma, Nova and Henighan, Tom
          and others},
  journal={Transformer Circuits Thread},
  year={2022}}
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from diffeqformer.analysis.attention_maps import maps
from diffeqformer.analysis.report import Section, in_float32, paragraph, table_of_heads, time_label
from diffeqformer.analysis.spectra import spectra
from diffeqformer.checkpoints.checkpoint import Checkpoint
from diffeqformer.console import figures
from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.errors import printable
from diffeqformer.transformer import Transformer


def to_successor(probabilities: Float[Array, "B H S S"]) -> Float[Array, "H"]:
    """The mean attention from the second half's tokens to the token after their first occurrence."""
    half = probabilities.shape[-1] // 2
    following = jnp.diagonal(probabilities, offset=1 - half, axis1=-2, axis2=-1)  # of token i to i + 1 - half
    return following[..., 1:].mean((0, 2))  # i = half ... S - 1


def induction_scores(
    model: Transformer, ids: Sequence[int], length: int, examples: int = 8, num_steps: int | None = None
) -> Float[np.ndarray, "T H"]:
    """The induction score of each head, on a sequence of random tokens that is repeated once.

    The score is the mean attention from the second half's tokens to the token after their first occurrence. It is 1 for
    a perfect induction head and ln 2 / length for uniform attention.

    Args:
        ids: ids from which the tokens are drawn.
        length: number of different tokens, at most half the model's positions and at most the number of ids.
    """
    random = np.random.RandomState(0)
    once = np.stack([random.choice(ids, length, replace=False) for _ in range(examples)])
    return np.asarray(maps(model, jnp.asarray(np.tile(once, 2)), num_steps, to_successor))


def readable_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids of tokens that text can consist of: no end-of-text, no parts of characters, no control characters."""
    texts = ((i, tokenizer.decode([i])) for i in range(tokenizer.vocab_size) if i != tokenizer.end_of_text)
    return [i for i, text in texts if text and text == printable(text) and "\ufffd" not in text]


@in_float32
def section(opened: Checkpoint, *, num_steps: int | None = None) -> Section:
    """Induction scores beside the signs of the spectra, from which the paper infers induction."""
    model = opened.model
    times = model.grid(num_steps).times[:: len(model.solver.nodes)]  # at which steps first evaluate the attention
    ids = readable_ids(opened.tokenizer)
    length = min(64, model.max_length // 2, len(ids))
    scores = induction_scores(model, ids, length, num_steps=num_steps)
    found = spectra(model, times, feed_forward=False)
    even = float(np.mean(1 / np.arange(length + 1, 2 * length + 1)))
    shares = {name: np.broadcast_to(one.positive_share(), scores.shape) for name, one in found.items()}
    figure, [axes] = figures.new_figure(1, 3, (13, 3.6))
    figures.heat_map(axes[0], scores, times, "induction score, from uniform attention's", "score", vmin=even, vmax=1)
    for axis, (name, share) in zip(axes[1:], shares.items(), strict=True):
        figures.heat_map(axis, share, times, f"{name}: share with a positive real part", "share", **figures.SHARES)
    for axis in axes:
        figures.time_axis(axis, time_label(model), times)
    columns = {"score": scores} | {f"{name} positive": share for name, share in shares.items()}
    shown = [
        paragraph(
            f"A sequence of {length} different random tokens is repeated once. The score is a head's mean attention "
            "from a token's second occurrence to the token that followed the first. Uniform attention scores "
            f"{even:.3f}, a perfect induction head 1."
        ),
        figures.as_html(figure, "induction scores"),
        table_of_heads(time_label(model), times, -scores, columns),
    ]
    print(f"induction: the best head scores {scores.max():.3f}; uniform attention {even:.3f}", flush=True)
    numbers = {"length": length, "even": even, "scores": scores.tolist()}
    return Section("induction", "Induction heads", "".join(shown), numbers, {"scores": scores, "times": times})
