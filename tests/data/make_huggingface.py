"""Make `huggingface_*.npz`: random parameters of tiny models, and their logits.

    pip install torch transformers        # no dependency of diffeqformer
    python tests/data/make_huggingface.py

Parameters are redrawn at a scale at which every one of them matters to the logits; in fp32, on a CPU.
"""

import pathlib

import numpy as np
import torch
import transformers

SMALL = dict(
    max_position_embeddings=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=100.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
CONFIGS = {
    "gpt2": transformers.GPT2Config(n_positions=16, n_embd=32, n_layer=6, n_head=4, vocab_size=64),
    "llama": transformers.LlamaConfig(
        **SMALL | dict(intermediate_size=64, num_hidden_layers=6),
        vocab_size=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    "llama3": transformers.LlamaConfig(
        **SMALL,
        vocab_size=64,
        num_key_value_heads=2,
        head_dim=12,
        rms_norm_eps=1e-3,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=LLAMA3,
    ),
    "qwen2": transformers.Qwen2Config(**SMALL, vocab_size=64, num_key_value_heads=1, tie_word_embeddings=True),
    "neox": transformers.GPTNeoXConfig(**SMALL, vocab_size=64, rotary_pct=0.5),
}


def redraw(model: torch.nn.Module) -> None:
    """Matrices at fan-in scale, gains of norms about 1, everything else about 0."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:
            parameter.data = 0.18 * noise
        else:
            parameter.data = 0.2 * noise + (1.0 if "weight" in name else 0.0)


for name, config in CONFIGS.items():
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    redraw(model)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens).logits
    tied = ["lm_head.weight"] * config.tie_word_embeddings
    parameters = {key: value.numpy() for key, value in model.state_dict().items() if key not in tied}
    file = pathlib.Path(__file__).parent / f"huggingface_{name}.npz"
    np.savez_compressed(file, tokens=tokens.numpy().astype(np.int32), logits=logits.numpy(), **parameters)
    print(f"{file.name}: transformers {transformers.__version__}, torch {torch.__version__}")
