"""How a text's last token depends on each token, by four measures side by side: sections 5.2 and B of the paper."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from diffeqformer.analysis import attention_maps, lyapunov
from diffeqformer.analysis.report import Section, highlighted, in_float32, paragraph
from diffeqformer.checkpoints.checkpoint import Checkpoint
from diffeqformer.checkpoints.finite import NotFinite
from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.solvers.solver import x_alone
from diffeqformer.transformer import Transformer, weights_at


def text_pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The characters that each token adds to a text. A character of several tokens belongs to the last of them."""
    pieces, before = [], ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        if end < len(ids):
            text = text.rstrip("\ufffd")  # an incomplete character
        pieces.append(text[len(before) :])
        before = max(before, text, key=len)
    return pieces


def measure(
    model: Transformer, tokens: Int[Array, "S"], target: int, num_steps: int | None, published_pairing: bool
) -> tuple[dict[str, Float[np.ndarray, "S"]], dict[str, np.ndarray]]:
    """The four measures of each token's influence by name, and the arrays behind the first two.

    Without the first one, if the solver carries more than the state. The last is the gradient of `target`'s.
    """
    measures, arrays = {}, {}
    if model.solver.begin is x_alone:
        arrays["exponents"] = lyapunov.exponents(model, tokens, num_steps, published=published_pairing)
        measures["Lyapunov sensitivity: largest exponent of equation (7)"] = arrays["exponents"].sum(0).max(-1)
    derivative = lyapunov.total_derivative(model, tokens, num_steps)
    sizes = np.linalg.svd(derivative, compute_uv=False)[:, 0]
    with np.errstate(divide="ignore"):
        measures["total derivative: log of the largest singular value"] = np.log(sizes)
    measures["attention rollout"] = attention_maps.rollout(model, tokens, num_steps)
    gradients = attention_maps.input_gradients(model, tokens, target, num_steps)
    measures["gradient of the prediction's log probability"] = gradients
    return measures, {**arrays, "derivative_sizes": sizes}


@in_float32
def section(
    opened: Checkpoint, ids: list[int], *, num_steps: int | None = None, published_pairing: bool = False
) -> Section:
    """How a text's last token depends on each token, by four measures.

    `lyapunov.exponents` explains `published_pairing`.
    """
    model = opened.model
    tokens, pieces = jnp.asarray(ids), text_pieces(opened.tokenizer, ids)
    logits = model(tokens[None], weights_at(model, num_steps))[0, -1]
    if not jnp.isfinite(logits[: opened.tokenizer.vocab_size]).all():
        raise NotFinite
    target = int(jnp.argmax(logits[: opened.tokenizer.vocab_size]))
    measures, arrays = measure(model, tokens, target, num_steps, published_pairing)
    predicted = opened.tokenizer.decode([target])
    exception = "" if model.solver in lyapunov.OTHERS_WAIT else ", but within a step of this solver"
    shown = [
        paragraph(
            f"How the last of {len(ids)} tokens depends on each of them; the model's prediction of the next one is "
            f"{predicted!r}. Darker is larger, and pointing at a token shows its value. Each line has its own scale, "
            "which excludes the last token (framed)."
        ),
        paragraph(
            "Exponents of equation (7) aren't shown, since this solver carries more than the state."
            if model.solver.begin is not x_alone
            else "Equation (7) treats each token and the last one as an isolated system. Its exponents are 0 for a "
            "token without influence. They ignore paths through other tokens and changes of the token "
            f"itself{exception}. The total derivative of the last state with respect to the first has all paths."
        ),
    ]
    if published_pairing:
        shown.append(paragraph("Times and states of the exponents are paired as in the authors' code."))
    for name, values in measures.items():
        shown += [paragraph(name), highlighted(pieces, values)]
    numbers = {
        "tokens": ids,
        "pieces": pieces,
        "prediction": predicted,
        "published_pairing": published_pairing,
        "measures": {name: values.tolist() for name, values in measures.items()},
    }
    return Section("sensitivity", "Sensitivity of a token", "".join(shown), numbers, arrays)
