"""GPT-large's shape on OpenWebText: 1280 wide, 36 steps, E = 96 (1.97 B parameters; GPT 774 M).

    python -m diffeqformer.main --config=configs/large.py            # :gpt and :shared are the baselines

Hardware: 16 TPU v5p or 64 v5e chips, or 8 GPUs with 80 GB (the authors used two A100 of that size). Parameters and Adam
moments are sharded: 3 GB on each of 8 devices, 1.6 of 16, 0.8 of 64. Each device also holds the activations of its
part of the batch; --config.model.remat=step needs less for them, and more time.
Hyperparameters: the paper's. C.4 lowers beta2 for this size; 0.95 is Llama-1B's value in the authors' YAML. By C.5 a
lower one is better for a DiffEqFormer, and worse for GPT. D.1 found E = 144 best: --config.model.time_embed_dim=144.
What to expect: not run, but for some steps on one H200 (benchmarks/README.md).

The corpus, about 40 GB of text, is downloaded and prepared at the first start. `python -m diffeqformer.prepare` with
the same --config does that beforehand.
"""

from diffeqformer.config import as_recipe, base_config


def get_config(model: str = "diffeqformer"):
    config = base_config("large", model)
    config.steps = 40_001
    config.batch_size = 256
    config.model.update(width=1280, heads=20, mlp=5120, num_steps=36, time_embed_dim=96, vocab_multiple=128)
    config.model.remat = "products"
    config.mesh.fsdp = 8
    config.optimizer.update(learning_rate=3e-4, epsilon=1e-6)
    config.optimizer.beta2 = 0.95 if model in ("diffeqformer", "alternative", "looped") else 0.999  # C.5
    return as_recipe(config) if model == "recipe" else config
