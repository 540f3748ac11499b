"""Llama-1B's shape on OpenWebText: 2048 wide, 16 steps, E = 96 (6.64 B parameters; Llama 1.20 B).

    python -m diffeqformer.main --config=configs/llama_1b.py \\
        --config.data.tokenizer_file=tokenizer.model                 # :llama is the baseline

You provide a SentencePiece model with a vocabulary of 32,000 entries.

Hardware: 4 TPU v5p or more, or 8 GPUs with 80 GB (the authors used eight H100 of that size). Parameters and Adam
moments are sharded: 20 GB on each of 4 devices, 10 of 8. Each device also holds the activations of its part of
the batch; --config.microbatches=8 makes them smaller.
Hyperparameters: the authors' published configuration.
What to expect: not run. The authors' Figure 8 shows a validation perplexity of about 9.7 at 40,000 steps, and 10.2
for the baseline.

The corpus, about 40 GB of text, is downloaded and prepared at the first start. `python -m diffeqformer.prepare` with
the same options does that beforehand.
"""

from diffeqformer.config import as_recipe, base_config


def get_config(model: str = "diffeqformer"):
    config = base_config("llama_1b", model, field="llama")
    config.steps = 40_001
    config.batch_size = 256
    config.sequence_length = 2048
    config.model.update(
        width=2048,
        heads=16,
        mlp=8192,
        num_steps=16,
        vocab_size=32_000,
        max_length=2048,
        time_embed_dim=96,
        sinusoidal_dim=256,
        dropout=0.0,
    )
    config.data.tokenizer = "sentencepiece"
    config.mesh.fsdp = 4
    config.optimizer.update(learning_rate=3e-4, weight_decay=1e-5, beta2=0.95)
    return as_recipe(config) if model == "recipe" else config
