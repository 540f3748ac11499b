"""The vector field of GPT-NeoX, which Pythia's models have: GPT's layers, rotary positions and the exact GELU.

@inproceedings{biderman2023pythia,
  title={Pythia: A Suite for Analyzing Large Language Models Across Training and Scaling},
  author={Biderman, Stella and Schoelkopf, Hailey and Anthony, Quentin and others},
  booktitle={International Conference on Machine Learning},
  year={2023}}
"""

import dataclasses
from typing import ClassVar

from diffeqformer.fields.field import head_width_of
from diffeqformer.fields.gpt import GPT
from diffeqformer.fields.rotary import Rotary


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeoX(GPT):
    """dx/dt = attention(norm_attention(x; t); t) + feed_forward(norm_mlp(x; t); t).

    Both branches read the same state in the original, too: with Euler steps of length 1 this is a GPT-NeoX. Positions
    rotate a part of each head's entries (`model.rotary_fraction`).
    """

    rotary: Rotary = dataclasses.field()  # without the default that it would inherit
    tied_head: bool = dataclasses.field()

    learned_positions: ClassVar[bool] = False
    tanh_gelu: ClassVar[bool] = False
    settings: ClassVar[tuple[str, ...]] = ("rope_theta", "rope_scaling", "rotary_fraction")

    @classmethod
    def from_config(cls, config, vanilla: bool) -> "NeoX":
        """The same block for a GPT-NeoX and for a DiffEqFormer."""
        rotated = int(config.rotary_fraction * head_width_of(config))
        return cls(
            width=config.width,
            heads=config.heads,
            head_width=head_width_of(config),
            mlp=config.mlp,
            epsilon=config.norm_epsilon or 1e-5,
            rotary=Rotary(config.max_length, rotated, config.rope_theta, config.rope_scaling),
            tied_head=config.tied_head,
        )
